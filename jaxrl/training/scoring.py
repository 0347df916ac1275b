"""What happens to a batch once, before its first update: scores and advantages."""

from typing import Any

import jax.numpy as jnp

from jaxrl import signature
from jaxrl.algorithms import compose
from jaxrl.functional.aggregation import token_weights
from jaxrl.models import lora
from jaxrl.signature import ConfigError
from jaxrl.training import expert_rows, forward
from jaxrl.training.columns import Columns, Numbers, columns_of
from jaxrl.training.packing import Plan
from jaxrl.training.state import Spec
from jaxrl.types import Advantages, Array, Batch, Params

Metrics = dict[str, Array]


def prepare(
  spec: Spec,
  chunks: int,
  params: Params,
  ref_params: Params | None,
  algorithm_state: dict[str, Any],
  batch: Batch,
  numbers: Numbers,
  plan: Plan | None = None,
) -> tuple[dict[str, Array], dict[str, Any], Metrics]:
  """Scores `[N, T]` in `chunks` of the train step's shape, then makes advantages.

  plan: of packed rows to score them on, instead of chunks.

  Returns the columns to put into the batch, the states, by slot, that hold from the
  next batch on, and metrics. The KL penalty comes off the rewards before any advantage
  sees them: R_t ← R_t − penalty(o, q)_t on the actions the policy sampled.
  """
  parts = chunks if plan is None else plan
  batch, outputs = _score(spec, parts, params, ref_params, batch, numbers)
  columns = columns_of(spec, batch, algorithm_state, numbers) | outputs
  mask = batch.action_mask
  sampled = mask & ~batch.expert_mask[:, None]
  if batch.greedy_mask is not None:
    sampled &= ~batch.greedy_mask[:, None]
  after, metrics = _control(spec, columns, sampled, algorithm_state, numbers)
  penalty = _penalty(spec, columns, sampled, algorithm_state, numbers)
  if penalty is not None:
    columns['rewards'] = batch.rewards - penalty
    metrics['kl/penalty'] = (token_weights(sampled) * penalty).sum()
  changed = {
    name: getattr(batch, name)
    for name in ('old_logprobs', 'ref_logprobs', 'values')
    if name in spec.needs
  }
  if spec.algorithm.advantage is not None:
    lone = expert_rows.lone(spec.algorithm, columns)
    others = expert_rows.left_out(columns, lone)
    result = _advantages(spec, others, penalty, algorithm_state, numbers)
    told = others['mask']
    if batch.greedy_mask is not None:
      told = told & ~batch.greedy_mask[:, None]
    metrics |= _spread(result.advantages, told)
    result = expert_rows.put_back(result, lone, batch.rewards, mask)
    changed['advantages'] = result.advantages
    if result.returns is not None:
      changed['returns'] = result.returns
    if result.keep is not None:
      changed['action_mask'] = mask & result.keep
    if spec.carries('advantage') and result.state is not None:
      after['advantage'] = result.state
    metrics |= {f'advantage/{name}': x for name, x in result.metrics.items()}
  return changed, after, metrics


def _advantages(
  spec: Spec,
  columns: Columns,
  penalty: Array | None,
  state: dict[str, Any],
  numbers: Numbers,
) -> Advantages:
  part = spec.algorithm.advantage
  assert part is not None  # the caller looked
  if spec.carries('advantage'):
    columns = columns | {'state': state['advantage']}
  result = compose.call_part(part, columns, numbers['parts'].get('advantage'))
  name = compose.function_of(part).__name__
  if result.state is not None and not spec.carries('advantage'):
    raise ConfigError(
      f'{name} returns a state but is not marked: put @stateful(init) from '
      'jaxrl.functional.marks above it'
    )
  if penalty is not None and 'rewards' not in compose.columns(part):
    # It judges each token by itself, so that token's penalty comes off it directly.
    return Advantages(
      result.advantages - penalty,
      result.returns,
      result.keep,
      result.metrics,
      result.state,
    )
  return result


def _penalty(
  spec: Spec,
  columns: Columns,
  sampled: Array,
  state: dict[str, Any],
  numbers: Numbers,
) -> Array | None:
  """`[B, T]` what comes off the rewards; 0 where the policy did not sample."""
  part = spec.algorithm.kl_penalty
  if part is None:
    return None
  penalty = compose.call_part(part, columns, numbers['parts'].get('kl_penalty'))
  if 'kl_controller' in state:
    penalty = state['kl_controller']['scale'] * penalty
  return jnp.where(sampled, penalty, 0)


def _control(
  spec: Spec,
  columns: Columns,
  sampled: Array,
  state: dict[str, Any],
  numbers: Numbers,
) -> tuple[dict[str, Any], Metrics]:
  """The KL controller's next state, and the coefficient that holds for this batch.

  It is told the mean over sampled tokens of the term's estimator at coefficient 1, of
  the behaviour policy from the reference.
  """
  controller = spec.algorithm.kl_controller
  if controller is None:
    return {}, {}
  slot = 'kl_loss' if spec.algorithm.kl_loss is not None else 'kl_penalty'
  part, options = getattr(spec.algorithm, slot), dict(numbers['parts'].get(slot, {}))
  coef = (signature.defaults(compose.function_of(part)) | options).get('coef')
  if coef is not None:
    options['coef'] = 1.0
  estimate = jnp.where(sampled, compose.call_part(part, columns, options), 0)
  given = columns | {
    'kl': (token_weights(sampled) * estimate).sum(),
    'num_rows': jnp.sum(jnp.any(sampled, axis=1)).astype(jnp.float32),
  }
  if spec.carries('kl_controller'):
    given['state'] = state['kl_controller']
  after = compose.call_part(controller, given, numbers['parts'].get('kl_controller'))
  scale = state['kl_controller']['scale']
  metrics = {'kl/behaviour': given['kl']}
  metrics['kl/coef'] = scale * jnp.float32(1.0 if coef is None else coef)
  return {'kl_controller': after}, metrics


def _spread(advantages: Array, mask: Array) -> Metrics:
  weights = token_weights(mask)
  mean = (weights * advantages).sum()
  square = (weights * jnp.square(advantages)).sum()
  return {
    'advantage/mean': mean,
    'advantage/std': jnp.sqrt(jnp.maximum(square - mean**2, 0)),
  }


def _score(
  spec: Spec,
  parts: int | Plan,
  params: Params,
  ref_params: Params | None,
  batch: Batch,
  numbers: Numbers,
) -> tuple[Batch, Columns]:
  """The batch with what forward passes must give; columns that only parts here read."""
  asked = {name: True for name in ('entropy', 'nec') if name in spec.reads_before}
  own = bool(asked) or bool(spec.needs & {'old_logprobs', 'values'})
  reference, config = 'ref_logprobs' in spec.needs, spec.model.config
  if not own and not reference:
    return batch, {}

  def score(tokens, segment_ids, routed, rows):
    def outputs(weights, routed, **asked):
      return forward.outputs(
        *(spec.model, weights, tokens, segment_ids, routed, rows),
        temperature=numbers['temperature'],
        **asked,
      )

    return (
      outputs(params, routed, **asked) if own else None,
      # The reference policy has a router of its own.
      outputs(lora.join(config, params, ref_params), None).logprobs
      if reference
      else None,
    )

  arrays = batch.tokens, batch.segment_ids, batch.routed_experts
  mine, ref = forward.in_parts(spec, parts, score, *arrays)
  if reference:
    batch = batch.replace(ref_logprobs=ref)
  if mine is None:
    return batch, {}
  batch = batch.replace(old_logprobs=mine.logprobs, values=mine.values)
  return batch, {'entropy': mine.entropy, 'nec': mine.nec}
