"""What happens to a batch once, before its first update: scores and advantages."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.algorithms import compose
from jaxrl.functional.aggregation import token_weights
from jaxrl.training.state import Spec, columns_of
from jaxrl.types import Array, Batch, Params

Numbers = dict[str, Any]


def prepare(
  spec: Spec,
  chunks: int,
  params: Params,
  ref_params: Params | None,
  algorithm_state: Any,
  batch: Batch,
  numbers: Numbers,
) -> tuple[dict[str, Array], dict[str, Array]]:
  """Scores `[N, T]` in `chunks` of the train step's shape, then makes advantages.

  Returns the columns to put into the batch and metrics. The KL penalty comes off the
  rewards before any advantage sees them: R_t ← R_t − penalty(o, q)_t on actions.
  """
  algorithm = spec.algorithm
  batch, entropy = _score(spec, chunks, params, ref_params, batch, numbers)
  columns = columns_of(batch, algorithm.behaviour, algorithm_state)
  columns['entropy'] = entropy
  mask, metrics = batch.action_mask, {}
  parts = numbers['parts']
  if algorithm.kl_penalty is not None:
    penalty = compose.call_part(algorithm.kl_penalty, columns, parts.get('kl_penalty'))
    penalty = jnp.where(mask, penalty, 0)
    columns['rewards'] = batch.rewards - penalty
    metrics['kl/penalty'] = (token_weights(mask) * penalty).sum()
  changed = {
    name: columns[name]
    for name in ('old_logprobs', 'ref_logprobs')
    if name in spec.needs
  }
  if 'values' in spec.needs:
    changed['values'] = batch.values
  if algorithm.advantage is not None:
    result = compose.call_part(algorithm.advantage, columns, parts.get('advantage'))
    changed['advantages'] = result.advantages
    if result.returns is not None:
      changed['returns'] = result.returns
    if result.keep is not None:
      changed['action_mask'] = mask & result.keep
    metrics |= {f'advantage/{name}': x for name, x in result.metrics.items()}
    metrics |= _spread(result.advantages, mask)
  return changed, metrics


def _spread(advantages: Array, mask: Array) -> dict[str, Array]:
  weights = token_weights(mask)
  mean = (weights * advantages).sum()
  square = (weights * jnp.square(advantages)).sum()
  return {
    'advantage/mean': mean,
    'advantage/std': jnp.sqrt(jnp.maximum(square - mean**2, 0)),
  }


def _score(
  spec: Spec,
  chunks: int,
  params: Params,
  ref_params: Params | None,
  batch: Batch,
  numbers: Numbers,
) -> tuple[Batch, Array | None]:
  """The batch with the columns that a forward pass must give; the entropy if read."""
  entropy = 'entropy' in spec.reads_before
  own = entropy or bool(spec.needs & {'old_logprobs', 'values'})
  reference = 'ref_logprobs' in spec.needs
  if not own and not reference:
    return batch, None

  def body(_, inputs):
    tokens, segment_ids = (spec.model.constrain(x, 'batch', None) for x in inputs)

    def outputs(weights, entropy):
      return spec.model.policy_outputs(
        weights,
        tokens,
        segment_ids,
        temperature=numbers['temperature'],
        entropy=entropy,
      )

    return None, (
      outputs(params, entropy) if own else None,
      outputs(ref_params, False).logprobs if reference else None,
    )

  split = jax.tree.map(
    lambda x: x.reshape(chunks, -1, x.shape[-1]), (batch.tokens, batch.segment_ids)
  )
  scored = jax.lax.scan(body, None, split)[1]
  mine, ref = jax.tree.map(lambda x: x.reshape(batch.tokens.shape), scored)
  if reference:
    batch = batch.replace(ref_logprobs=ref)
  if mine is None:
    return batch, None
  return batch.replace(old_logprobs=mine.logprobs, values=mine.values), mine.entropy
