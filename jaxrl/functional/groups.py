"""Sums and statistics over runs and over the groups of runs that share a task.

Ids are dense int32 `[B]`; −1 marks a padding row, which enters nothing. A run is one
attempt at a task and may own several rows (one per turn). Quantities indexed by run
id are `[B]` too, with unused ids at the end: no `[B, B]` array is ever made.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl.types import Array

MAX_EXPONENT = 20.0
EPSILON = 1e-6  # added to standard deviations


def exp(x: Array) -> Array:
  """e^x with the exponent clipped to ±20, and no gradient beyond."""
  return jnp.exp(jnp.clip(x, -MAX_EXPONENT, MAX_EXPONENT))


def total(x: Array, ids: Array) -> Array:
  """`[B]` Σ of x over the entries of each id; entries with id −1 are left out."""
  size = ids.shape[0]
  return jax.ops.segment_sum(x, jnp.where(ids < 0, size, ids), size + 1)[:size]


def largest(x: Array, ids: Array) -> Array:
  """`[B]` maximum of x over the entries of each id; the lowest value where none."""
  size = ids.shape[0]
  return jax.ops.segment_max(x, jnp.where(ids < 0, size, ids), size + 1)[:size]


def spread(x: Array, ids: Array) -> Array:
  """`[B]` the value x[id] of each entry; 0 where the id is −1."""
  return jnp.where(ids < 0, 0, x[jnp.maximum(ids, 0)])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stats:
  """Per entry `[B]`: what its group looks like. `equal` is max = min."""

  count: Array
  mean: Array
  equal: Array


def group_stats(x: Array, ids: Array) -> Stats:
  """Mean and size of the group each entry `[B]` belongs to."""
  count = spread(total(jnp.ones_like(x), ids), ids)
  mean = spread(total(x, ids), ids) / jnp.maximum(count, 1)
  top, bottom = spread(largest(x, ids), ids), -spread(largest(-x, ids), ids)
  return Stats(count, jnp.where(top == bottom, top, mean), top == bottom)


def group_std(centred: Array, ids: Array, count: Array) -> Array:
  """`[B]` sample (ddof 1) standard deviation of the group of each entry.

  centred: x minus its group's mean. Groups of one have standard deviation 0.
  """
  variance = spread(total(centred**2, ids), ids) / jnp.maximum(count - 1, 1)
  return safe_sqrt(variance)


def safe_sqrt(x: Array) -> Array:
  """√x with gradient 0, not infinity, at 0."""
  positive = x > 0
  return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1)), 0)


def masked_mean(x: Array, mask: Array) -> Array:
  """Mean of x where the mask is set; 0 over nothing."""
  return jnp.sum(jnp.where(mask, x, 0)) / jnp.maximum(jnp.sum(mask), 1)


def masked_std(x: Array, mask: Array) -> Array:
  """Sample (ddof 1) standard deviation of x where the mask is set."""
  centred = jnp.where(mask, x - masked_mean(x, mask), 0)
  return safe_sqrt(jnp.sum(centred**2) / jnp.maximum(jnp.sum(mask) - 1, 1))


def whiten(x: Array, mask: Array) -> Array:
  """(x − mean)/(std + 1e-6) over the set entries, 0 elsewhere; equal ones give 0."""
  top = jnp.max(jnp.where(mask, x, -jnp.inf))
  bottom = jnp.min(jnp.where(mask, x, jnp.inf))
  centred = jnp.where(mask & (top > bottom), x - masked_mean(x, mask), 0)
  count = jnp.maximum(jnp.sum(mask) - 1, 1)
  return centred / (safe_sqrt(jnp.sum(centred**2) / count) + EPSILON)


def rank(x: Array, ids: Array) -> Array:
  """`[B]` how many entries with the same id are strictly smaller, for each entry."""
  order = jnp.lexsort((x, ids))
  sorted_ids, sorted_x = ids[order], x[order]
  place = jnp.arange(ids.shape[0])
  new_id = jnp.diff(sorted_ids, prepend=sorted_ids[:1] - 1) != 0
  new_x = new_id | (sorted_x != jnp.roll(sorted_x, 1))
  first_of_id = jax.lax.cummax(jnp.where(new_id, place, 0))
  first_of_x = jax.lax.cummax(jnp.where(new_x, place, 0))
  return jnp.zeros_like(place).at[order].set(first_of_x - first_of_id)


def order(x: Array | float) -> Array:
  """int32 that rank as x does: the bits of floats that are not negative."""
  return jax.lax.bitcast_convert_type(jnp.asarray(x, jnp.float32), jnp.int32)


def last(holds: Callable[[Array], Array]) -> Array:
  """The largest place of a finite float for which `holds`, −1 if for none.

  holds: of an `order`, true up to some place and false beyond. This finds a threshold
  among floats to the last bit in 31 passes over them: for millions of tokens, several
  times faster than sorting them.
  """

  def halve(_, ends):
    low, high = ends
    middle = low + (high - low) // 2
    good = holds(middle)
    return jnp.where(good, middle, low), jnp.where(good, high, middle)

  ends = jnp.int32(-1), order(jnp.inf)
  return jax.lax.fori_loop(0, 31, halve, ends)[0]


def pair_up(first: Array, second: Array) -> Array:
  """`[B]` dense ids of the pairs (first, second); −1 where either is negative."""
  order = jnp.lexsort((second, first))
  a, b = first[order], second[order]
  new = (a != jnp.roll(a, 1)) | (b != jnp.roll(b, 1))
  ids = jnp.zeros_like(order).at[order].set(jnp.cumsum(new.at[0].set(True)) - 1)
  return jnp.where((first < 0) | (second < 0), -1, ids)


def inside(mask: Array, *columns: Array) -> tuple[Array, ...]:
  """Each column with 0 where the mask is not set: no rubbish, NaN neither, gets in."""
  return tuple(jnp.where(mask, x, 0) for x in columns)


def row_sum(x: Array, mask: Array) -> Array:
  """`[B]` Σ_t of x `[B, T]` where the mask is set."""
  return jnp.sum(jnp.where(mask, x, 0), axis=-1)


def row_mean(x: Array, mask: Array) -> Array:
  """`[B]` mean over t of x `[B, T]` where the mask is set; 0 for an empty row."""
  return row_sum(x, mask) / jnp.maximum(jnp.sum(mask, axis=-1), 1)


def run_returns(rewards: Array, run_ids: Array) -> Array:
  """`[B]` by run id: Σ of rewards `[B, T]` over all tokens of all rows of the run."""
  return total(jnp.sum(rewards, axis=-1), run_ids)


def run_tasks(task_ids: Array, run_ids: Array) -> Array:
  """`[B]` by run id: the task of the run; −1 where no run has that id."""
  ids = jnp.where(task_ids < 0, -1, run_ids)
  return jnp.maximum(largest(task_ids, ids), -1)


def to_tokens(per_run: Array, run_ids: Array, mask: Array) -> Array:
  """`[B, T]` the value of each token's run, 0 where the mask is not set."""
  return jnp.where(mask, spread(per_run, run_ids)[:, None], 0).astype(jnp.float32)
