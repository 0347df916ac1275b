"""The advantage step scores a batch and computes advantages, once before its updates.

It is a pure function: forward passes of the policy and, if a component needs it, the
reference policy, then the KL controller, the KL penalty, and the advantage.

Offline rows, which an expert wrote, are in no statistic of the rollouts. A row from a
file is a group of its own, so there is nothing to compare it with: advantages are
computed as if it were padding, and its own advantage is its reward, as for any group of
one without a baseline. Rated rows of one prompt form a group and are compared.
"""

from typing import Any

import jax.numpy as jnp

from jaxrl.functional.aggregation import token_weights
from jaxrl.functional.components import call_component, fields_of, function_of
from jaxrl.models import lora
from jaxrl.options import ConfigError, defaults
from jaxrl.training import forward_pass
from jaxrl.training.batch_fields import (
  BatchFields,
  HParams,
  make_batch_fields,
  mask_out_rows,
  restore_rows,
  singleton_rows,
)
from jaxrl.training.batching.packing_plan import PackingPlan
from jaxrl.training.train_state import AlgorithmState, StepSpec
from jaxrl.types import Advantages, Array, Batch, Params, PolicyOutputs

StepMetrics = dict[str, Array]


def score_and_compute_advantages(
  spec: StepSpec,
  num_chunks: int,
  params: Params,
  ref_params: Params | None,
  algorithm_state: AlgorithmState,
  batch: Batch,
  hparams: HParams,
  plan: PackingPlan | None = None,
) -> tuple[dict[str, Array], AlgorithmState, StepMetrics]:
  """Scores a batch and computes its advantages.

  The KL penalty is subtracted from the rewards before the advantage reads them:
  R_t ← R_t − penalty(o, q)_t on the actions that the policy sampled.

  Args:
    spec: Everything static.
    num_chunks: The number of chunks that the batch is scored in, which have the shape
      of the train step's micro-batches.
    params: The learner's parameters.
    ref_params: The reference policy's own parameters, if there is one.
    algorithm_state: The state of stateful components.
    batch: The batch `[N, T]`, on the devices.
    hparams: The traced options, as for `train_step`.
    plan: Packed rows to score the batch on, instead of chunks.

  Returns:
    `(changed, next_state, metrics)`: the batch's new or changed fields, the state that
    components carry to the next batch, and scalar metrics.

  Raises:
    ConfigError: The advantage returns a state although it declares none.
  """
  algorithm = spec.algorithm
  chunks = num_chunks if plan is None else plan
  batch, outputs = _score(spec, chunks, params, ref_params, batch, hparams)
  fields = make_batch_fields(algorithm, batch, algorithm_state, hparams) | outputs
  mask = batch.action_mask
  sampled = mask & ~batch.expert_mask[:, None]
  if batch.greedy_mask is not None:
    sampled &= ~batch.greedy_mask[:, None]
  next_state, metrics = _update_kl_controller(
    spec, fields, sampled, algorithm_state, hparams
  )
  penalty = _kl_penalty(spec, fields, sampled, algorithm_state, hparams)
  if penalty is not None:
    fields['rewards'] = batch.rewards - penalty
    metrics['kl/penalty'] = (token_weights(sampled) * penalty).sum()
  changed = {
    name: getattr(batch, name)
    for name in ('old_logprobs', 'ref_logprobs', 'values')
    if name in spec.scored_fields
  }
  if algorithm.advantage is not None:
    result, advantage_metrics = _advantages_of_all_rows(
      spec, batch, fields, penalty, algorithm_state, hparams
    )
    metrics |= advantage_metrics
    changed['advantages'] = result.advantages
    if result.returns is not None:
      changed['returns'] = result.returns
    if result.keep is not None:
      changed['action_mask'] = mask & result.keep
    if spec.has_state('advantage') and result.state is not None:
      next_state['advantage'] = result.state
  return changed, next_state, metrics


def _score(
  spec: StepSpec,
  chunks: int | PackingPlan,
  params: Params,
  ref_params: Params | None,
  batch: Batch,
  hparams: HParams,
) -> tuple[Batch, BatchFields]:
  """Returns the batch with its scored fields, and the fields only this step reads."""
  measured = 'entropy', 'nec', 'sum_pi_squared'
  options = {name: True for name in measured if name in spec.advantage_fields}
  score_policy = bool(options) or bool(spec.scored_fields & {'old_logprobs', 'values'})
  score_reference = 'ref_logprobs' in spec.scored_fields
  if not score_policy and not score_reference:
    return batch, {}

  encoded = forward_pass.with_images(spec, params, batch)

  def score(
    tokens: Array,
    segment_ids: Array,
    routed_experts: Array | None,
    images: tuple[Array, Array] | None,
    packed_rows: Any,
  ) -> tuple[PolicyOutputs | None, Array | None]:
    def run(params: Params, routed: Array | None, **options: Any) -> PolicyOutputs:
      return forward_pass.compute_outputs(
        spec.model,
        params,
        tokens,
        segment_ids,
        routed,
        images,
        packed_rows,
        temperature=hparams['temperature'],
        **options,
      )

    outputs = run(encoded, routed_experts, **options) if score_policy else None
    if not score_reference:
      return outputs, None
    # The reference policy routes tokens by itself.
    return outputs, run(reference, None).logprobs

  reference = encoded
  if score_reference:
    reference = lora.merge_trainable(spec.model.config, params, ref_params)
    reference = forward_pass.with_images(spec, reference, batch)
  images = forward_pass.image_options(vars(batch))
  inputs = batch.tokens, batch.segment_ids, batch.routed_experts, images
  outputs, ref_logprobs = forward_pass.map_micro_batches(spec, chunks, score, *inputs)
  if score_reference:
    batch = batch.replace(ref_logprobs=ref_logprobs)
  if outputs is None:
    return batch, {}
  batch = batch.replace(old_logprobs=outputs.logprobs, values=outputs.values)
  return batch, {name: getattr(outputs, name) for name in measured}


def _update_kl_controller(
  spec: StepSpec,
  fields: BatchFields,
  sampled: Array,
  state: AlgorithmState,
  hparams: HParams,
) -> tuple[AlgorithmState, StepMetrics]:
  """Returns the KL controller's next state, and metrics with this batch's coefficient.

  The controller gets the KL term's estimate at coefficient 1, of the behaviour policy
  from the reference, averaged over sampled tokens.
  """
  controller = spec.algorithm.kl_controller
  if controller is None:
    return {}, {}
  component = 'kl_loss' if spec.algorithm.kl_loss is not None else 'kl_penalty'
  part = getattr(spec.algorithm, component)
  options = dict(hparams['parts'].get(component, {}))
  coef = (defaults(function_of(part)) | options).get('coef')
  if coef is not None:
    options['coef'] = 1.0
  estimate = jnp.where(sampled, call_component(part, fields, options), 0)
  kl = (token_weights(sampled) * estimate).sum()
  controller_fields = fields | {
    'kl': kl,
    'num_rows': jnp.sum(jnp.any(sampled, axis=1)).astype(jnp.float32),
  }
  if spec.has_state('kl_controller'):
    controller_fields['state'] = state['kl_controller']
  next_state = call_component(
    controller, controller_fields, hparams['parts'].get('kl_controller')
  )
  scale = state['kl_controller']['scale']
  metrics = {
    'kl/behaviour': kl,
    'kl/coef': scale * jnp.float32(1.0 if coef is None else coef),
  }
  return {'kl_controller': next_state}, metrics


def _kl_penalty(
  spec: StepSpec,
  fields: BatchFields,
  sampled: Array,
  state: AlgorithmState,
  hparams: HParams,
) -> Array | None:
  """Computes the penalty `[B, T]` on rewards; 0 where the policy did not sample."""
  part = spec.algorithm.kl_penalty
  if part is None:
    return None
  penalty = call_component(part, fields, hparams['parts'].get('kl_penalty'))
  if 'kl_controller' in state:
    penalty = state['kl_controller']['scale'] * penalty
  return jnp.where(sampled, penalty, 0)


def _advantages_of_all_rows(
  spec: StepSpec,
  batch: Batch,
  fields: BatchFields,
  penalty: Array | None,
  state: AlgorithmState,
  hparams: HParams,
) -> tuple[Advantages, StepMetrics]:
  """Computes the advantages of rollouts and of offline rows, and their metrics."""
  singletons = singleton_rows(spec.algorithm, fields)
  others = mask_out_rows(fields, singletons)
  result = _compute_advantages(spec, others, penalty, state, hparams)
  reported = others['mask']
  if batch.greedy_mask is not None:
    reported = reported & ~batch.greedy_mask[:, None]
  metrics = _mean_and_std(result.advantages, reported)
  metrics |= {f'advantage/{name}': x for name, x in result.metrics.items()}
  return restore_rows(result, singletons, batch.rewards, batch.action_mask), metrics


def _compute_advantages(
  spec: StepSpec,
  fields: BatchFields,
  penalty: Array | None,
  state: AlgorithmState,
  hparams: HParams,
) -> Advantages:
  part = spec.algorithm.advantage
  assert part is not None  # the caller has checked
  if spec.has_state('advantage'):
    fields = fields | {'state': state['advantage']}
  result = call_component(part, fields, hparams['parts'].get('advantage'))
  if result.state is not None and not spec.has_state('advantage'):
    raise ConfigError(
      f'{function_of(part).__name__} returns a state but is not marked: put '
      '@component(init_state=init) from jaxrl.functional.components above it'
    )
  if penalty is None or 'rewards' in fields_of(part):
    return result
  # It judges each token by itself, so the token's penalty is subtracted directly.
  return Advantages(
    result.advantages - penalty,
    result.returns,
    result.keep,
    result.metrics,
    result.state,
  )


def _mean_and_std(advantages: Array, mask: Array) -> StepMetrics:
  weights = token_weights(mask)
  mean = (weights * advantages).sum()
  mean_square = (weights * jnp.square(advantages)).sum()
  return {
    'advantage/mean': mean,
    'advantage/std': jnp.sqrt(jnp.maximum(mean_square - mean**2, 0)),
  }
