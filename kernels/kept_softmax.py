"""The softmax of logits on GPU: kept for the backward pass, or computed again in tiles.

Plain matrix products, which XLA gives to cuBLAS, a tile of rows at a time: the float32
logits of a tile are reduced to the statistics of its rows and then discarded. What is
kept of them is w = e^{(z − m)/τ}, a `[N, V]` array in the dtype of the states (z are a
row's logits, m their maximum). Log-probs and their gradient are then three products and
not four. A rounded w has a relative error of 2⁻⁹ in bfloat16 however small it is, while
a rounded logit of 20 is wrong by 0.06. All statistics come from float32 logits.

The gradient of a row's logits is g·(hit − p)/τ. With p = w·f, f = e^{(m − top)/τ}/Z and
top the maximum over the whole vocabulary, it is −c·(w − hit/f), where c = g·f/τ. These
factors of rows can be applied to the states, so that no pass over `[N, V]` is needed:
the second term changes one element of each row, in place.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.chunked_logits import scan_blocks
from kernels.softmax_stats import (
  NUM_COLUMNS,
  BackwardStats,
  SoftmaxStats,
  StatsKind,
  block_stats,
  logits_grad,
  pack_columns,
  unpack_columns,
)

TILE_LOGITS = 2**27  # float32 logits that are held at a time: 512 MiB
TILE_MULTIPLE = 64  # of rows, for whole tiles of a matrix product
# Least (m − top)/τ of a shard of the vocabulary: p is then below 1e-13, and 1/f is far
# from an overflow.
LEAST_EXPONENT = -30.0
FACTORS = ('chosen', 'flat', 'tilt', 'square')  # of a row's gradient, in BackwardStats


class KeptSoftmax(NamedTuple):
  """What is kept of the logits of a part of the vocabulary.

  Attributes:
    weights: e^{(z − m)/τ}, `[N, V]` in the dtype of the states.
    top: Largest logit m of each row in this part, `[N, 1]` float32.
  """

  weights: jax.Array
  top: jax.Array


def softmax_stats(
  hidden: jax.Array,
  table: jax.Array,
  targets: jax.Array,
  inverse: jax.Array,
  *,
  kind: StatsKind,
) -> SoftmaxStats:
  """Computes the softmax statistics of rows over the whole table.

  Args:
    hidden: Hidden states `[N, D]`.
    table: Table `[V, D]`.
    targets: Index of each target in the table, `[N]` int32; −1 if it is not there.
    inverse: Inverse temperature 1/τ, a float32 scalar.
    kind: Statistics to compute.
  """
  return _stats_in_tiles(hidden, table, targets, inverse, kind, keeps=False)[0]


def keep_softmax(
  hidden: jax.Array,
  table: jax.Array,
  targets: jax.Array,
  inverse: jax.Array,
  *,
  kind: StatsKind,
) -> tuple[SoftmaxStats, KeptSoftmax]:
  """Computes `softmax_stats`, and keeps the softmax for `kept_gradients`.

  Args:
    hidden: Hidden states `[N, D]`.
    table: Table `[V, D]`.
    targets: Index of each target in the table, `[N]` int32; −1 if it is not there.
    inverse: Inverse temperature 1/τ, a float32 scalar.
    kind: Statistics to compute.
  """
  stats, weights = _stats_in_tiles(hidden, table, targets, inverse, kind, keeps=True)
  return stats, KeptSoftmax(weights, stats.top)


def _stats_in_tiles(
  hidden: jax.Array,
  table: jax.Array,
  targets: jax.Array,
  inverse: jax.Array,
  kind: StatsKind,
  *,
  keeps: bool,
) -> tuple[SoftmaxStats, Any]:
  """Returns the statistics, and the weights of `KeptSoftmax` or None."""
  (count, _), vocab, table = hidden.shape, len(table), table.astype(hidden.dtype)

  def step(carry, block):
    stats, weights = carry
    logits = _dot(block.take(hidden, 0), table.T)
    new = block_stats(logits, None, inverse, kind)
    target = block.take(targets, 0)[:, None]
    # A gather reads an element a row: a mask would cost another pass over the logits.
    chosen = jnp.take_along_axis(logits, jnp.maximum(target, 0), axis=1)
    new = new._replace(chosen=jnp.where(target >= 0, chosen, 0.0))
    if keeps:
      kept = jnp.exp((logits - new.top) * inverse).astype(hidden.dtype)
      weights = block.put(weights, kept, 0)
    return block.put(stats, pack_columns(new), 0), weights

  # Every row of these is written before it is read.
  stats = jax.lax.empty((count, NUM_COLUMNS), jnp.float32)
  weights = jax.lax.empty((count, vocab), hidden.dtype) if keeps else None
  stats, weights = scan_blocks(
    step, (stats, weights), count, _tile_rows(vocab), TILE_MULTIPLE
  )
  return SoftmaxStats(*unpack_columns(stats)), weights


def kept_gradients(
  hidden: jax.Array,
  table: jax.Array,
  targets: jax.Array,
  inverse: jax.Array,
  of: BackwardStats,
  kept: KeptSoftmax,
  *,
  chosen: jax.Array,
  dtypes: tuple[Any, Any],
  product_of_table: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Computes the gradients of log-probs from the softmax that was kept.

  Args:
    hidden: Hidden states `[N, D]`.
    table: Table `[V, D]`.
    targets: Index of each target in the table, `[N]` int32; −1 if it is not there.
    inverse: Inverse temperature 1/τ, a float32 scalar.
    of: Backward statistics of the rows; only those of log-probs are read.
    kept: Result of `keep_softmax`.
    chosen: Logits of the targets, `[N, 1]` float32.
    dtypes: Dtypes of the two gradients.
    product_of_table: Computes wᵀ·x of w `[N, V]` and x `[N, D]`; the plain product
      unless told.

  Returns:
    The gradients `[N, D]` and `[V, D]`, in `dtypes`.
  """
  exponent = jnp.maximum((kept.top - of.top) * inverse, LEAST_EXPONENT)
  factor = jnp.exp(exponent - of.log_total)
  new = jnp.exp((chosen - kept.top) * inverse) - 1 / factor
  rows, vocab = jnp.arange(len(hidden)), len(table)
  where = rows, jnp.where(targets < 0, vocab, targets)
  weights = kept.weights.at[where].set(
    new[:, 0].astype(kept.weights.dtype),
    mode='drop',
    unique_indices=True,
    indices_are_sorted=True,
  )
  scale = -of.chosen * factor  # of.chosen is g/τ
  scaled = (scale * hidden).astype(hidden.dtype)
  of_hidden = scale * _dot(weights, table.astype(hidden.dtype))
  of_table = (product_of_table or _product_of_table)(weights, scaled)
  return of_hidden.astype(dtypes[0]), of_table.astype(dtypes[1])


def _product_of_table(weights: jax.Array, rows: jax.Array) -> jax.Array:
  return _dot(weights.T, rows)


def gradients(
  hidden: jax.Array,
  table: jax.Array,
  targets: jax.Array,
  inverse: jax.Array,
  of: BackwardStats,
  *,
  kind: StatsKind,
  dtypes: tuple[Any, Any],
  rows: int,
) -> tuple[jax.Array, jax.Array]:
  """Computes the gradients with a fourth product, which forms the logits again.

  Args:
    hidden: Hidden states `[N, D]`.
    table: Table `[V, D]`.
    targets: Index of each target in the table, `[N]` int32; −1 if it is not there.
    inverse: Inverse temperature 1/τ, a float32 scalar.
    of: Backward statistics of the rows.
    kind: Statistics whose gradient is needed.
    dtypes: Dtypes of the two gradients.
    rows: Rows whose logits' gradient is held at a time, before rounding. Each time, the
      whole gradient of the table is read and written.

  Returns:
    The gradients `[N, D]` and `[V, D]`, in `dtypes`.
  """
  table, numbers = table.astype(hidden.dtype), pack_columns(of)

  def add(sums, block):
    of_hidden, of_table = sums
    own = block.take(hidden, 0)
    own_of = BackwardStats(*unpack_columns(block.take(numbers, 0)))
    # Rows of the previous tile count once: their gradient is 0 where these factors are.
    factors = {name: block.new(getattr(own_of, name), 0) for name in FACTORS}
    own_of = pack_columns(own_of._replace(**factors))
    d = _slopes_in_tiles(own, table, block.take(targets, 0), inverse, own_of, kind)
    of_hidden = block.add(of_hidden, _dot(d, table).astype(of_hidden.dtype), 0)
    return of_hidden, of_table + _dot(d.T, own)

  sums = jnp.zeros(hidden.shape, dtypes[0]), jnp.zeros(table.shape, jnp.float32)
  of_hidden, of_table = scan_blocks(add, sums, len(hidden), rows, TILE_MULTIPLE)
  return of_hidden, of_table.astype(dtypes[1])


def _slopes_in_tiles(
  hidden: jax.Array,
  table: jax.Array,
  targets: jax.Array,
  inverse: jax.Array,
  numbers: jax.Array,
  kind: StatsKind,
) -> jax.Array:
  """Computes the gradient of the logits, `[N, V]` in the dtype of the states."""
  count, vocab = len(hidden), len(table)

  def step(slopes, block):
    logits = _dot(block.take(hidden, 0), table.T)
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    hit = ids == block.take(targets, 0)[:, None]
    of = BackwardStats(*unpack_columns(block.take(numbers, 0)))
    new = logits_grad(logits, hit, of, inverse, kind)
    return block.put(slopes, new.astype(slopes.dtype), 0)

  slopes = jax.lax.empty((count, vocab), hidden.dtype)
  return scan_blocks(step, slopes, count, _tile_rows(vocab), TILE_MULTIPLE)


def _tile_rows(vocab: int) -> int:
  """Returns how many rows' float32 logits are held at a time, before rounding."""
  return max(1, TILE_LOGITS // vocab)


# Float32 is multiplied as such: by default, a GPU would round it to TF32.
def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
  precision = 'highest' if a.dtype == jnp.float32 else None
  product = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
  return product(a, b, precision=precision)
