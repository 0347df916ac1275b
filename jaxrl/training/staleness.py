"""Staleness is the age of the weights that sampled a token; it can be limited.

Staleness = step − the version of the oldest action token, where a version is the step
at which the weights were published. A row has that of its oldest token, a group that of
its oldest row; rows from files have none.

`rollout.staleness_policy` is a call string of one of `STALENESS_POLICIES`, which say
what happens to older tokens. 'drop' is applied when groups are taken from the queue,
'mask' and 'recompute' by the learner, once a batch is scored (`apply_limit`).
"""

import functools
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl.algorithms import requirements
from jaxrl.component_table import ComponentTable
from jaxrl.group_stats import oldest_weights_version
from jaxrl.options import ConfigError
from jaxrl.training.parallelism import sharding
from jaxrl.types import Algorithm, Array, Batch, Group, PyTree

Action = Literal['drop', 'mask', 'recompute']


class StalenessLimit(NamedTuple):
  """A limit on staleness.

  Attributes:
    action: What happens to older tokens.
    max_age: Steps that a token may be old.
  """

  action: Action
  max_age: int

  def oldest_allowed(self, step: int) -> int:
    """Returns the oldest version that a step learns from unchanged."""
    return step - self.max_age


def drop(*, max: int = 2) -> StalenessLimit:
  """Drops groups with an older token; others are sampled in their place.

  Args:
    max: Steps that a token may be old.

  Returns:
    The limit.
  """
  return StalenessLimit('drop', max)


def mask(*, max: int = 2) -> StalenessLimit:
  """Keeps older tokens out of the loss.

  They leave the action mask after advantages are computed: they count in rewards,
  returns and baselines, but not in losses, aggregation, ratios of sequences and the
  metrics of losses.

  Args:
    max: Steps that a token may be old.

  Returns:
    The limit.
  """
  return StalenessLimit('mask', max)


def recompute(*, max: int = 2) -> StalenessLimit:
  """Replaces the old log-probabilities of rows with an older token.

  For these rows alone, `old_logprobs` are the learner's own before the first update of
  the batch, and a correction weights them against the rollout's. All other rows keep
  the rollout's, at which a correction is 1.

  Args:
    max: Steps that a token may be old.

  Returns:
    The limit.
  """
  return StalenessLimit('recompute', max)


STALENESS_POLICIES = ComponentTable(
  'rule',
  'rollout.staleness_policy',
  {'drop': drop, 'mask': mask, 'recompute': recompute},
)


def check_limit(limit: StalenessLimit | None, algorithm: Algorithm) -> None:
  """Raises ConfigError if log-probabilities are recomputed that nobody scores."""
  if limit is None or limit.action != 'recompute':
    return
  if 'old_logprobs' not in requirements.needs(algorithm):
    raise ConfigError(
      "rollout.staleness_policy='recompute' needs an algorithm that reads "
      "old_logprobs, with old_logprobs_source='decoupled'"
    )


def group_staleness(group: Group, step: int) -> int | None:
  """Returns the steps since the oldest weights that sampled an action of a group.

  Args:
    group: The rows of the group.
    step: The step that learns from it.

  Returns:
    The staleness, or None for rows from files.
  """
  version = oldest_weights_version(group)
  return None if version is None else step - version


def check_groups(groups: Iterable[Group], step: int, max_age: int) -> None:
  """Raises RuntimeError if a group is too old: whoever took it made a mistake.

  Args:
    groups: Groups that were taken for a step.
    step: The step.
    max_age: Steps that a token may be old.
  """
  for group in groups:
    age = group_staleness(group, step)
    if age is not None and age > max_age:
      raise RuntimeError(
        f'group {group[0].group_name} was taken for step {step} at staleness {age}, '
        f'past the bound of {max_age}: this is a fault of the queue, not of the '
        'settings'
      )


def compile_limit_programs(
  limit: StalenessLimit | None, mesh: Mesh, size: tuple[int, int], *, scored: bool
) -> None:
  """Compiles the programs that batches of a size need.

  Args:
    limit: The limit, if there is one.
    mesh: The learner's mesh.
    size: `(B, T)` of the batch.
    scored: Whether batches have `old_logprobs`.
  """
  for function in _needed_functions(limit, scored):
    _compiled(function, mesh, size)


def num_limit_programs(limit: StalenessLimit | None, *, scored: bool) -> int:
  """Returns how many programs `compile_limit_programs` compiles for a size."""
  return len(_needed_functions(limit, scored))


def mismatch_by_age(
  host_batch: Batch, batch: Batch, step: int, mesh: Mesh
) -> dict[str, float]:
  """Computes the mean |log π_learner − log π_rollout| by the age of tokens.

  An engine whose weights are replaced in the middle of a sequence goes on with the keys
  and values of the old ones. Tokens after an older token of their sequence therefore
  count as stale, even if this step's weights sampled them.

  Args:
    host_batch: The batch in numpy.
    batch: The scored batch on the devices.
    step: The learner's step.
    mesh: The mesh that `batch` lies on.

  Returns:
    'mismatch/fresh', of tokens that this step's weights sampled alone, which no update
    explains, and 'mismatch/stale', of the other tokens. Nothing if there are no others,
    or if the learner has not scored `old_logprobs`.
  """
  sampled = host_batch.action_mask & (host_batch.weights_version >= 0)
  sampled &= ~(host_batch.expert_mask | host_batch.greedy_mask)[:, None]
  older = sampled & (host_batch.weights_version < step)
  if batch.old_logprobs is None or not older.any():
    return {}
  stale = sampled & _after_any(older, host_batch.segment_ids)
  masks = {'mismatch/fresh': sampled & ~stale, 'mismatch/stale': stale}
  put = functools.partial(sharding.put_array, layout=sharding.rows_sharding(mesh))
  means = _compiled(_mean_differences, mesh, stale.shape)(
    batch.old_logprobs, batch.rollout_logprobs, *map(put, masks.values())
  )
  return {
    name: float(mean)
    for (name, mask), mean in zip(masks.items(), np.asarray(means), strict=True)
    if mask.any()
  }


def _after_any(marked: np.ndarray, segment_ids: np.ndarray) -> np.ndarray:
  """Returns `[B, T]` bool: tokens at or after a marked one of their segment."""
  after = np.zeros_like(marked)
  for segment in range(1, segment_ids.max(initial=0) + 1):
    inside = segment_ids == segment
    after |= inside & np.logical_or.accumulate(marked & inside, axis=1)
  return after


def apply_limit(
  limit: StalenessLimit | None, host_batch: Batch, batch: Batch, step: int, mesh: Mesh
) -> tuple[Batch, dict[str, float]]:
  """Applies a limit to a scored batch.

  Args:
    limit: The limit, if there is one; 'drop' has been applied before.
    host_batch: The batch in numpy, as it was sampled.
    batch: The scored batch on the devices.
    step: The learner's step.
    mesh: The mesh that `batch` lies on.

  Returns:
    The batch to learn from, and metrics: 'staleness/masked', the share of sampled
    tokens that stay out of the loss, or 'staleness/recomputed', the share of rows whose
    old log-probabilities are the learner's.
  """
  if limit is None or limit.action == 'drop':
    return batch, {}
  put = functools.partial(sharding.put_array, layout=sharding.rows_sharding(mesh))
  sampled = host_batch.action_mask & (host_batch.weights_version >= 0)
  too_old = sampled & (host_batch.weights_version < limit.oldest_allowed(step))
  if limit.action == 'mask':
    mask_out = _compiled(_mask_out, mesh, too_old.shape)
    action_mask = mask_out(batch.action_mask, put(too_old))
    share = too_old.sum() / max(sampled.sum(), 1)
    return batch.replace(action_mask=action_mask), {'staleness/masked': float(share)}
  is_sampled_row = sampled.any(axis=1)
  is_old_row = too_old.any(axis=1)
  # A row that no weights sampled has no log-probabilities but the learner's.
  use_learner = np.broadcast_to((is_old_row | ~is_sampled_row)[:, None], too_old.shape)
  old_logprobs = _compiled(_select_logprobs, mesh, too_old.shape)(
    put(use_learner), batch.old_logprobs, batch.rollout_logprobs
  )
  share = is_old_row.sum() / max(np.sum(is_sampled_row), 1)
  metrics = {'staleness/recomputed': float(share)}
  return batch.replace(old_logprobs=old_logprobs), metrics


def _mean_differences(
  old_logprobs: Array, rollout_logprobs: Array, fresh: Array, stale: Array
) -> Array:
  difference = jnp.abs(old_logprobs - rollout_logprobs)

  def mean(mask: Array) -> Array:
    return jnp.where(mask, difference, 0).sum() / jnp.maximum(mask.sum(), 1)

  return jnp.stack([mean(fresh), mean(stale)])


def _mask_out(action_mask: Array, too_old: Array) -> Array:
  return action_mask & ~too_old


def _select_logprobs(
  use_learner: Array, old_logprobs: Array, rollout_logprobs: Array
) -> Array:
  return jnp.where(use_learner, old_logprobs, rollout_logprobs)


# Function → the dtypes of its arguments, all `[B, T]`, and whether it returns `[B, T]`.
_SIGNATURES = {
  _mean_differences: ((jnp.float32, jnp.float32, jnp.bool_, jnp.bool_), False),
  _mask_out: ((jnp.bool_, jnp.bool_), True),
  _select_logprobs: ((jnp.bool_, jnp.float32, jnp.float32), True),
}


@functools.lru_cache(maxsize=64)
def _compiled(
  function: Callable[..., PyTree], mesh: Mesh, size: tuple[int, int]
) -> jax.stages.Compiled:
  """Compiles ahead of time, so that no step with older tokens waits for a compiler."""
  dtypes, returns_rows = _SIGNATURES[function]
  by_row, replicated = sharding.rows_sharding(mesh), sharding.replicated(mesh)
  arguments = [jax.ShapeDtypeStruct(size, dtype, sharding=by_row) for dtype in dtypes]
  layout = by_row if returns_rows else replicated
  return jax.jit(function, out_shardings=layout).lower(*arguments).compile()


def _needed_functions(
  limit: StalenessLimit | None, scored: bool
) -> list[Callable[..., PyTree]]:
  functions: list[Callable[..., PyTree]] = [_mean_differences] if scored else []
  if limit is not None and limit.action != 'drop':
    functions.append(_mask_out if limit.action == 'mask' else _select_logprobs)
  return functions
