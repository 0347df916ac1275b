"""The minibatch loss adds up an algorithm's loss components as Σ w·l.

Components return one loss per token or row and never reduce. The weights w come from
counts of the whole minibatch, computed once before it is split, so the sum over
micro-batches, packed rows and devices equals the loss of the whole minibatch. Metrics
are summed in the same way.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.algorithms import requirements
from jaxrl.functional.aggregation import pair_weights, row_weights, token_weights
from jaxrl.functional.components import call_component, fields_of, function_of
from jaxrl.functional.reductions import MAX_EXPONENT, clipped_exp
from jaxrl.options import ConfigError
from jaxrl.training import forward_pass
from jaxrl.training.batch_fields import BatchFields, HParams, precompute_fields
from jaxrl.training.train_state import StepSpec
from jaxrl.types import Algorithm, Array, Params

# The components whose losses are added up, and the prefix of their metrics.
LOSS_COMPONENTS = {
  'policy_loss': 'policy',
  'kl_loss': 'kl',
  'entropy_loss': 'entropy',
  'value_loss': 'value',
}
# Whether there are tokens, and tokens that were sampled, to take the mean of.
TOKENS, SAMPLED_TOKENS = 'any/tokens', 'any/sampled_tokens'
LossWeights = dict[str, Array]
MetricSums = dict[str, Array]


def minibatch_weights(algorithm: Algorithm, fields: BatchFields) -> LossWeights:
  """Computes the weights that reduce losses and metrics of a minibatch.

  Args:
    algorithm: Its aggregation and batch unit decide the weights.
    fields: Fields of the whole minibatch, before it is split.

  Returns:
    'token' `[N, T]` for losses per token, 'row' `[N]` for losses per row, 'mean'
    `[N, T]` for metrics, and 'rollout' `[N, T]` for metrics of sampled rows alone.
  """
  mask, aggregation = fields['mask'], algorithm.aggregation
  if algorithm.batch_unit == 'pair':
    row = pair_weights(fields['pair_ids'])
  else:
    row = row_weights(mask)
  return {
    'token': token_weights(mask, mode=aggregation.name, **aggregation.options),
    'row': row,
    'mean': token_weights(mask),
    'rollout': token_weights(mask & ~fields['expert_mask'][:, None]),
  }


def micro_batch_loss(
  spec: StepSpec,
  params: Params,
  fields: BatchFields,
  weights: LossWeights,
  hparams: HParams,
) -> tuple[Array, MetricSums]:
  """Computes Σ w·l over the rows of one micro-batch.

  Args:
    spec: The spec of the step.
    params: All parameters of the model.
    fields: Fields of the micro-batch `[B, …]`, and those that all rows share.
    weights: The micro-batch's rows of `minibatch_weights`.
    hparams: The traced options.

  Returns:
    The loss, a scalar, and the micro-batch's share of every metric.

  Raises:
    ConfigError: A component has reduced its loss.
  """
  fields = fields | _run_model(spec, params, fields, hparams)
  if not spec.is_split:  # these rows are the whole minibatch
    detached = fields | {'logprobs': jax.lax.stop_gradient(fields['logprobs'])}
    fields |= precompute_fields(spec.algorithm, detached, hparams, reads_logprobs=True)
  total, sums = jnp.zeros(()), {}
  for component, prefix in LOSS_COMPONENTS.items():
    part = getattr(spec.algorithm, component)
    if part is None:
      continue
    result = call_component(part, fields, hparams['parts'].get(component))
    loss, metrics = result if isinstance(result, tuple) else (result, {})
    if component == 'policy_loss':
      loss, correction_sums = _apply_row_weights_and_correction(
        spec, loss, fields, weights, hparams
      )
      sums |= correction_sums
    elif component == 'kl_loss':
      loss = fields.get('kl_scale', 1.0) * loss
    _check_not_reduced(component, part, loss, fields['mask'])
    loss = _weighted_sum(loss, weights['token'], weights['row'], fields['mask'])
    total, sums[f'loss/{prefix}'] = total + loss, loss
    # A component that reads expert_mask reports metrics of sampled rows alone.
    token = weights['rollout' if 'expert_mask' in fields_of(part) else 'mean']
    for name, metric in metrics.items():
      metric = jax.lax.stop_gradient(metric).astype(jnp.float32)
      num_micro_batches = fields.get('num_micro_batches', spec.num_micro_batches)
      share = 1.0 if metric.ndim else 1.0 / num_micro_batches
      metric = _weighted_sum(metric, token, weights['row'], fields['mask'])
      sums[f'{prefix}/{name}'] = share * metric
  sums |= jax.lax.stop_gradient(_policy_metrics(fields, weights))
  # 1 over the minibatch, or 0 if there is nothing to take a mean of.
  sums |= {TOKENS: weights['mean'].sum(), SAMPLED_TOKENS: weights['rollout'].sum()}
  return total, sums | {'loss/total': total}


def finish_metrics(sums: MetricSums) -> MetricSums:
  """Turns sums over all micro-batches into metrics.

  Sums named `…/_weight` and `…/_square` become an effective sample size `…/ess`, as a
  share of the tokens.
  """
  metrics = {name: x for name, x in sums.items() if '/_' not in name}
  for name, weight in sums.items():
    if name.endswith('/_weight'):
      prefix = name.removesuffix('/_weight')
      square = jnp.maximum(sums[f'{prefix}/_square'], 1e-30)
      metrics[f'{prefix}/ess'] = weight**2 / square
  return metrics


def _run_model(
  spec: StepSpec, params: Params, fields: BatchFields, hparams: HParams
) -> BatchFields:
  """Computes the outputs of this update's own forward pass, by field."""
  read = spec.update_fields
  options = {}
  if 'nec' in read:
    options['nec'] = True
  if 'topk_logprobs' in read:
    options['topk_ids'] = fields['teacher_topk_ids']
  outputs = forward_pass.compute_outputs(
    spec.model,
    params,
    fields['tokens'],
    fields['segment_ids'],
    fields.get('routed_experts'),
    forward_pass.image_options(fields),
    fields.get('packed_rows'),
    temperature=hparams['temperature'],
    entropy=spec.entropy or 'entropy' in read,
    **options,
  )
  names = ('logprobs', 'entropy', 'values', 'nec', 'topk_logprobs')
  return {name: getattr(outputs, name) for name in names}


def _apply_row_weights_and_correction(
  spec: StepSpec,
  loss: Array,
  fields: BatchFields,
  weights: LossWeights,
  hparams: HParams,
) -> tuple[Array, MetricSums]:
  """Multiplies the policy loss by the weights of rows and of the correction."""
  if loss.ndim:
    row_factors = fields['loss_weights']
    loss = loss * row_factors.reshape(row_factors.shape + (1,) * (loss.ndim - 1))
  part = spec.algorithm.correction
  if part is None:
    return loss, {}
  if loss.ndim != 2:
    name = function_of(spec.algorithm.policy_loss).__name__
    raise ConfigError(f'{name} has no loss per token that a correction could weight')
  if not requirements.has_ratio(spec.algorithm):
    fields = fields | {'old_logprobs': jax.lax.stop_gradient(fields['logprobs'])}
  correction, metrics = call_component(part, fields, hparams['parts'].get('correction'))
  # The rollout policy did not sample an expert's row: there is nothing to correct.
  correction = jnp.where(fields['expert_mask'][:, None], 1, correction)
  rollout = weights['rollout']
  w = jnp.where(fields['mask'], correction, 0)
  sums = {
    'correction/weight': (rollout * w).sum(),
    'correction/_weight': (rollout * w).sum(),
    'correction/_square': (rollout * w * w).sum(),
  }
  if 'masked' in metrics:
    sums['correction/masked'] = (rollout * metrics['masked']).sum()
  return loss * correction, jax.lax.stop_gradient(sums)


def _weighted_sum(x: Array, token: Array, row: Array, mask: Array) -> Array:
  """Computes Σ w·x, with the weights for x's shape; ignores values outside the mask."""
  if x.ndim == 2:
    return (token * jnp.where(mask, x, 0)).sum()
  if x.ndim == 1:
    return (row * jnp.where(row > 0, x, 0)).sum()
  return x


def _check_not_reduced(
  component: str, part: Callable[..., Any], loss: Array, mask: Array
) -> None:
  """Raises ConfigError for a reduced loss: it would count once per micro-batch."""
  if loss.shape not in (mask.shape, mask.shape[:1]):
    name = function_of(part).__name__
    raise ConfigError(
      f'{component}={name} returns a loss of shape {list(loss.shape)} for a batch of '
      f'{list(mask.shape)}: losses never reduce. Return one value a token, [B, T], or '
      'a row, [B]; algorithm.aggregation says how they are averaged'
    )


def _policy_metrics(fields: BatchFields, weights: LossWeights) -> MetricSums:
  """Computes this micro-batch's share of the metrics that every run reports."""
  mask, logprobs = fields['mask'], fields['logprobs']
  mean, rollout = weights['mean'], weights['rollout']
  difference = jnp.where(mask, logprobs - fields['rollout_logprobs'], 0)
  ratio = clipped_exp(difference)
  sums = {
    'policy/logprob': (mean * logprobs).sum(),
    'mismatch/logprob_difference': (rollout * jnp.abs(difference)).sum(),
    'mismatch/kl': (rollout * (ratio - 1 - difference)).sum(),
    'mismatch/_weight': (rollout * ratio).sum(),
    'mismatch/_square': (rollout * ratio * ratio).sum(),
  }
  if fields['entropy'] is not None:
    sums['policy/entropy'] = (mean * fields['entropy']).sum()
  if fields['ref_logprobs'] is not None:
    log_ratio = jnp.where(mask, fields['ref_logprobs'] - logprobs, 0)
    log_ratio = jnp.clip(log_ratio, -MAX_EXPONENT, MAX_EXPONENT)
    sums['kl/reference'] = (mean * (jnp.exp(log_ratio) - 1 - log_ratio)).sum()
  return sums
