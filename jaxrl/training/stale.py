"""What a bound on staleness makes of a batch, once it has been scored."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl.algorithms import compose
from jaxrl.data.staleness import Bound
from jaxrl.signature import ConfigError
from jaxrl.training import sharding
from jaxrl.types import Algorithm, Array, Batch

Metrics = dict[str, float]


def check(bound: Bound | None, algorithm: Algorithm) -> None:
  """Raises ConfigError where old log-probs are to be used and none are scored."""
  if bound is None or bound.action != 'recompute':
    return
  if 'old_logprobs' not in compose.needs(algorithm):
    raise ConfigError(
      "rollout.staleness='recompute' needs old_logprobs of the learner's: an "
      "algorithm that reads them, with behaviour='decoupled'"
    )


def _means(old: Array, rollout: Array, fresh: Array, aged: Array) -> Array:
  difference = jnp.abs(old - rollout)

  def mean(chosen: Array) -> Array:
    return jnp.where(chosen, difference, 0).sum() / jnp.maximum(chosen.sum(), 1)

  return jnp.stack([mean(fresh), mean(aged)])


def _without(mask: Array, old: Array) -> Array:
  return mask & ~old


def _chosen(scored: Array, old: Array, rollout: Array) -> Array:
  return jnp.where(scored, old, rollout)


# Function → dtypes of what it takes, all `[B, T]`; whether it gives `[B, T]`.
_PROGRAMS = {
  _means: ((jnp.float32, jnp.float32, jnp.bool_, jnp.bool_), False),
  _without: ((jnp.bool_, jnp.bool_), True),
  _chosen: ((jnp.bool_, jnp.float32, jnp.float32), True),
}


@functools.lru_cache(maxsize=64)
def _program(function: Any, mesh: Mesh, size: tuple[int, int]) -> Callable[..., Any]:
  """Compiled ahead, so that no step with older tokens waits for a compiler."""
  dtypes, by_row = _PROGRAMS[function]
  rows, whole = sharding.rows(mesh), sharding.replicated(mesh)
  arguments = [jax.ShapeDtypeStruct(size, dtype, sharding=rows) for dtype in dtypes]
  layout = rows if by_row else whole
  return jax.jit(function, out_shardings=layout).lower(*arguments).compile()


def warmup(
  bound: Bound | None, mesh: Mesh, size: tuple[int, int], *, scored: bool
) -> None:
  """Compiles what batches of `size`, `[B, T]`, need. scored: with `old_logprobs`."""
  for function in _needed(bound, scored):
    _program(function, mesh, size)


def num_programs(bound: Bound | None, *, scored: bool) -> int:
  """How many `warmup` compiles for a size."""
  return len(_needed(bound, scored))


def _needed(bound: Bound | None, scored: bool) -> list[Callable[..., Any]]:
  found: list[Callable[..., Any]] = [_means] if scored else []
  if bound is not None and bound.action != 'drop':
    found.append(_without if bound.action == 'mask' else _chosen)
  return found


def mismatch(host: Batch, batch: Batch, step: int, mesh: Mesh) -> Metrics:
  """Mean |log π_learner − log π_rollout| by age, where a batch holds older tokens.

  mismatch/fresh: of tokens that this step's weights wrote, which no update explains.
  mismatch/stale: of older ones. Only where the learner has scored `old_logprobs`.
  """
  sampled = host.action_mask & (host.weights_version >= 0)
  sampled &= ~(host.expert_mask | host.greedy_mask)[:, None]
  older = sampled & (host.weights_version < step)
  if batch.old_logprobs is None or not older.any():
    return {}
  split = sampled & ~older, older
  put = functools.partial(sharding.put, layout=sharding.rows(mesh))
  means = _program(_means, mesh, older.shape)(
    batch.old_logprobs, batch.rollout_logprobs, *map(put, split)
  )
  names = ('mismatch/fresh', 'mismatch/stale')
  found = zip(names, split, np.asarray(means), strict=True)
  return {name: float(mean) for name, chosen, mean in found if chosen.any()}


def settle(
  bound: Bound | None, host: Batch, batch: Batch, step: int, mesh: Mesh
) -> tuple[Batch, Metrics]:
  """The scored batch as it is learned from, and what was done to it.

  host: the same batch in numpy, as it was played. mesh: that `batch` lies on.
  staleness/masked: the share of sampled tokens that stay out of the loss.
  staleness/recomputed: of rows that start from log-probs of the learner's.
  """
  if bound is None or bound.action == 'drop':  # which was done when they were taken
    return batch, {}
  put = functools.partial(sharding.put, layout=sharding.rows(mesh))
  written = host.action_mask & (host.weights_version >= 0)
  old = written & (host.weights_version < bound.oldest(step))
  if bound.action == 'mask':
    mask = _program(_without, mesh, old.shape)(batch.action_mask, put(old))
    share = old.sum() / max(written.sum(), 1)
    return batch.replace(action_mask=mask), {'staleness/masked': float(share)}
  there = written.any(axis=1)
  anew = old.any(axis=1)
  # What no weights wrote has no other log-probs than these.
  scored = np.broadcast_to((anew | ~there)[:, None], old.shape)
  chosen = _program(_chosen, mesh, old.shape)(
    put(scored), batch.old_logprobs, batch.rollout_logprobs
  )
  share = anew.sum() / max(np.sum(there), 1)
  return batch.replace(old_logprobs=chosen), {'staleness/recomputed': float(share)}
