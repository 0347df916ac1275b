"""The train step: one optimizer update from one minibatch, as a pure function."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.algorithms import compose
from jaxrl.functional.aggregation import pair_weights, row_weights, token_weights
from jaxrl.training import optimizer
from jaxrl.training.scoring import Numbers
from jaxrl.training.state import Spec, TrainState, columns_of, select_rows
from jaxrl.types import Algorithm, Array, Batch, Params

# The parts whose losses add up, and the first word of their metrics.
LOSSES = {
  'policy_loss': 'policy',
  'kl_loss': 'kl',
  'entropy_loss': 'entropy',
  'value_loss': 'value',
}
MAX_EXPONENT = 20.0
Columns = dict[str, Any]


def train_step(
  spec: Spec, state: TrainState, batch: Batch, index: Array, numbers: Numbers
) -> tuple[TrainState, dict[str, Array]]:
  """One update from rows `index` `[micro_batches, R]` (−1 pads) of `batch`.

  The weights that make losses and metrics one number come from the counts of the
  whole minibatch, before it is split: the split changes nothing but rounding.
  numbers: 'parts' (options by slot), 'optimizer', 'temperature'; all traced.
  Returns the new state and scalar metrics.
  """
  columns, own_state = _minibatch(spec, state, batch, index.reshape(-1))
  weights = _weights(spec.algorithm, columns)
  split = jax.tree.map(
    lambda x: x.reshape(index.shape + x.shape[1:]), (columns, weights)
  )
  gradient = jax.grad(_loss, argnums=1, has_aux=True)

  def one(micro):
    columns, weights = jax.tree.map(lambda x: _by_rows(spec, x), micro)
    columns['state'] = own_state
    return gradient(spec, state.params, columns, weights, numbers)

  if spec.micro_batches == 1:
    gradients, sums = one(jax.tree.map(lambda x: x[0], split))
  else:

    def accumulate(total, micro):
      gradients, sums = one(micro)
      return jax.tree.map(jnp.add, total, gradients), sums

    start = jax.tree.map(jnp.zeros_like, state.params)
    gradients, sums = jax.lax.scan(accumulate, start, split)
    sums = jax.tree.map(lambda x: x.sum(0), sums)
  params, opt_state, metrics = optimizer.update(
    state.params, state.opt_state, gradients, numbers['optimizer']
  )
  metrics = {f'optimizer/{name}': x for name, x in metrics.items()}
  return TrainState(params, opt_state, own_state), metrics | _finish(sums)


def _by_rows(spec: Spec, x: Array) -> Array:
  return spec.model.constrain(x, 'batch', *(None,) * (x.ndim - 1))


def _minibatch(
  spec: Spec, state: TrainState, batch: Batch, index: Array
) -> tuple[Columns, Any]:
  """The columns of the minibatch, and the algorithm's state after `prepare`.

  `prepare` returns columns to put in the place of those it read; its 'state', if it
  returns one, is carried to the next update.
  """
  batch = select_rows(batch, index)
  algorithm, own = spec.algorithm, state.algorithm_state
  columns = columns_of(batch, algorithm.behaviour, own)
  columns |= {'tokens': batch.tokens, 'segment_ids': batch.segment_ids}
  if algorithm.prepare is not None:
    columns |= compose.call_part(algorithm.prepare, columns)
  own = columns.pop('state')
  return columns, own


def _weights(algorithm: Algorithm, columns: Columns) -> dict[str, Array]:
  """What sums losses per token and per row, metrics, and the mismatch."""
  mask = columns['mask']
  if algorithm.atom == 'pair':
    row = pair_weights(columns['pair_ids'])
  else:
    row = row_weights(mask)
  played = mask & ~columns['expert_mask'][:, None]
  return {
    'token': token_weights(mask, mode=algorithm.aggregation),
    'row': row,
    'mean': token_weights(mask),
    'played': token_weights(played),
  }


def _loss(
  spec: Spec,
  params: Params,
  columns: Columns,
  weights: dict[str, Array],
  numbers: Numbers,
) -> tuple[Array, dict[str, Array]]:
  """Σ w·l over the rows of one micro-batch, and its share of every metric."""
  entropy = spec.entropy or _reads(spec.algorithm, 'entropy')
  outputs = spec.model.policy_outputs(
    params,
    columns['tokens'],
    columns['segment_ids'],
    temperature=numbers['temperature'],
    entropy=entropy,
  )
  columns = columns | {
    'logprobs': outputs.logprobs,
    'entropy': outputs.entropy,
    'values': outputs.values,
  }
  total, sums = jnp.zeros(()), {}
  for slot, name in LOSSES.items():
    part = getattr(spec.algorithm, slot)
    if part is None:
      continue
    result = compose.call_part(part, columns, numbers['parts'].get(slot))
    loss, metrics = result if isinstance(result, tuple) else (result, {})
    loss = _sum(loss, weights, weights['token'], columns['mask'])
    total, sums[f'loss/{name}'] = total + loss, loss
    for key, value in metrics.items():
      value = jax.lax.stop_gradient(value).astype(jnp.float32)
      scale = 1.0 if value.ndim else 1.0 / spec.micro_batches
      value = _sum(value, weights, weights['mean'], columns['mask'])
      sums[f'{name}/{key}'] = scale * value
  sums |= jax.lax.stop_gradient(_diagnostics(columns, weights))
  return total, sums | {'loss/total': total}


def _reads(algorithm: Algorithm, column: str) -> bool:
  parts = [getattr(algorithm, slot) for slot in LOSSES]
  return any(part and column in compose.columns(part) for part in parts)


def _sum(x: Array, weights: dict[str, Array], token: Array, mask: Array) -> Array:
  """Σ w·x with the weights that fit x's shape; what stands off the mask is not read."""
  if x.ndim == 2:
    return (token * jnp.where(mask, x, 0)).sum()
  return (weights['row'] * x).sum() if x.ndim == 1 else x


def _diagnostics(columns: Columns, weights: dict[str, Array]) -> dict[str, Array]:
  """This micro-batch's share of what every run reports."""
  mask, p = columns['mask'], columns['logprobs']
  d = jnp.where(mask, p - columns['rollout_logprobs'], 0)
  w = jnp.exp(jnp.clip(d, -MAX_EXPONENT, MAX_EXPONENT))
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


def _finish(sums: dict[str, Array]) -> dict[str, Array]:
  """Turns summed moments into the effective sample size, a share of the tokens."""
  weight, square = sums.pop('mismatch/_weight'), sums.pop('mismatch/_square')
  return sums | {'mismatch/ess': weight**2 / jnp.maximum(square, 1e-30)}
