"""What an update minimises: Σ w·l over the parts' losses, and what is told of it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.algorithms import compose
from jaxrl.functional.aggregation import pair_weights, row_weights, token_weights
from jaxrl.functional.groups import MAX_EXPONENT, exp
from jaxrl.signature import ConfigError
from jaxrl.training import forward
from jaxrl.training.columns import Columns, Numbers, make_columns
from jaxrl.training.state import Spec
from jaxrl.types import Algorithm, Array, Params

# The parts whose losses add up, and the first word of their metrics.
LOSSES = {
  'policy_loss': 'policy',
  'kl_loss': 'kl',
  'entropy_loss': 'entropy',
  'value_loss': 'value',
}
Part = Callable[..., Any]
Weights = dict[str, Array]
Sums = dict[str, Array]


def weights_of(algorithm: Algorithm, columns: Columns) -> Weights:
  """What sums losses per token and per row, metrics, and the mismatch.

  columns: of the whole minibatch, before it is split.
  """
  mask = columns['mask']
  if algorithm.atom == 'pair':
    row = pair_weights(columns['pair_ids'])
  else:
    row = row_weights(mask)
  return {
    'token': token_weights(mask, mode=algorithm.aggregation),
    'row': row,
    'mean': token_weights(mask),
    'played': token_weights(mask & ~columns['expert_mask'][:, None]),
  }


def loss(
  spec: Spec,
  params: Params,
  columns: Columns,
  weights: Weights,
  numbers: Numbers,
) -> tuple[Array, Sums]:
  """Σ w·l over the rows of one micro-batch, and its share of every metric."""
  columns = columns | _fresh(spec, params, columns, numbers)
  if not spec.split:  # these rows are the whole minibatch
    still = columns | {'logprobs': jax.lax.stop_gradient(columns['logprobs'])}
    columns |= make_columns(spec, still, numbers, fresh=True)
  total, sums = jnp.zeros(()), {}
  for slot, name in LOSSES.items():
    part = getattr(spec.algorithm, slot)
    if part is None:
      continue
    result = compose.call_part(part, columns, numbers['parts'].get(slot))
    value, metrics = result if isinstance(result, tuple) else (result, {})
    if slot == 'policy_loss':
      value, more = _weighed(spec, value, columns, weights, numbers)
      sums |= more
    elif slot == 'kl_loss':
      value = columns.get('kl_scale', 1.0) * value
    _check_shape(slot, part, value, columns['mask'])
    value = _sum(value, weights, weights['token'], columns['mask'])
    total, sums[f'loss/{name}'] = total + value, value
    # A part that tells experts' rows apart has metrics of the rollouts alone.
    of = 'played' if 'expert_mask' in compose.columns(part) else 'mean'
    for key, metric in metrics.items():
      metric = jax.lax.stop_gradient(metric).astype(jnp.float32)
      parts = columns.get('parts', spec.micro_batches)
      share = 1.0 if metric.ndim else 1.0 / parts
      metric = _sum(metric, weights, weights[of], columns['mask'])
      sums[f'{name}/{key}'] = share * metric
  sums |= jax.lax.stop_gradient(_diagnostics(columns, weights))
  return total, sums | {'loss/total': total}


def _fresh(spec: Spec, params: Params, columns: Columns, numbers: Numbers) -> Columns:
  """What the forward pass of this update says, by column."""
  read = spec.reads_after
  asked = {}
  if 'nec' in read:
    asked['nec'] = True
  if 'topk_logprobs' in read:
    asked['topk_ids'] = columns['teacher_topk_ids']
  outputs = forward.outputs(
    spec.model,
    params,
    columns['tokens'],
    columns['segment_ids'],
    columns.get('routed_experts'),
    columns.get('rows'),
    temperature=numbers['temperature'],
    entropy=spec.entropy or 'entropy' in read,
    **asked,
  )
  names = ('logprobs', 'entropy', 'values', 'nec', 'topk_logprobs')
  return {name: getattr(outputs, name) for name in names}


def _weighed(
  spec: Spec, value: Array, columns: Columns, weights: Weights, numbers: Numbers
) -> tuple[Array, Sums]:
  """The policy loss times its rows' weights and the correction's."""
  if value.ndim:
    rows = columns['loss_weights']
    value = value * rows.reshape(rows.shape + (1,) * (value.ndim - 1))
  part, sums = spec.algorithm.correction, {}
  if part is None:
    return value, sums
  if value.ndim != 2:
    name = compose.function_of(spec.algorithm.policy_loss).__name__
    raise ConfigError(f'{name} has no loss per token that a correction could weigh')
  if not compose.uses_old(spec.algorithm):
    columns = columns | {'old_logprobs': jax.lax.stop_gradient(columns['logprobs'])}
  correction, metrics = compose.call_part(
    part, columns, numbers['parts'].get('correction')
  )
  # Nobody sampled an expert's row, so there is no mismatch to weigh.
  correction = jnp.where(columns['expert_mask'][:, None], 1, correction)
  mask, played = columns['mask'], weights['played']
  w = jnp.where(mask, correction, 0)
  sums = {
    'correction/weight': (played * w).sum(),
    'correction/_weight': (played * w).sum(),
    'correction/_square': (played * w * w).sum(),
  }
  if 'masked' in metrics:
    sums['correction/masked'] = (played * metrics['masked']).sum()
  return value * correction, jax.lax.stop_gradient(sums)


def _sum(x: Array, weights: Weights, token: Array, mask: Array) -> Array:
  """Σ w·x with the weights that fit x's shape; what stands off the mask is not read."""
  if x.ndim == 2:
    return (token * jnp.where(mask, x, 0)).sum()
  if x.ndim == 1:
    row = weights['row']
    return (row * jnp.where(row > 0, x, 0)).sum()
  return x


def _check_shape(slot: str, part: Part, value: Array, mask: Array) -> None:
  """A loss that has reduced already would count once for each micro-batch."""
  if value.shape not in (mask.shape, mask.shape[:1]):
    name = compose.function_of(part).__name__
    raise ConfigError(
      f'{slot}={name} returns a loss of shape {list(value.shape)} for a batch of '
      f'{list(mask.shape)}: losses never reduce. Return one value a token, [B, T], or '
      'a row, [B]; algorithm.aggregation says how they are averaged'
    )


def _diagnostics(columns: Columns, weights: Weights) -> Sums:
  """This micro-batch's share of what every run reports."""
  mask, p = columns['mask'], columns['logprobs']
  d = jnp.where(mask, p - columns['rollout_logprobs'], 0)
  w = exp(d)
  mean, played = weights['mean'], weights['played']
  sums = {
    'policy/logprob': (mean * p).sum(),
    'mismatch/logprob_difference': (played * jnp.abs(d)).sum(),
    'mismatch/kl': (played * (w - 1 - d)).sum(),
    'mismatch/_weight': (played * w).sum(),
    'mismatch/_square': (played * w * w).sum(),
  }
  if columns['entropy'] is not None:
    sums['policy/entropy'] = (mean * columns['entropy']).sum()
  if columns['ref_logprobs'] is not None:
    back = jnp.where(mask, columns['ref_logprobs'] - p, 0)
    back = jnp.clip(back, -MAX_EXPONENT, MAX_EXPONENT)
    sums['kl/reference'] = (mean * (jnp.exp(back) - 1 - back)).sum()
  return sums


def finish(sums: Sums) -> Sums:
  """Turns summed moments into effective sample sizes, shares of the tokens."""
  done = {name: x for name, x in sums.items() if '/_' not in name}
  for name, weight in sums.items():
    if name.endswith('/_weight'):
      of = name.removesuffix('/_weight')
      square = jnp.maximum(sums[f'{of}/_square'], 1e-30)
      done[f'{of}/ess'] = weight**2 / square
  return done
