"""The softmax of logits on a CPU, kept for the backward pass in float32.

The same as `kernels.kept_softmax` on a GPU, but for the passes over the logits of the
forward pass: `row_softmax.c` makes one of them, and the softmax takes the place of the
logits. Log-probs and their gradient are three products and that pass.
"""

import functools

import jax
import jax.numpy as jnp

from kernels import kept_softmax
from kernels.chunked_logits import scan_blocks
from kernels.kept_softmax import KeptSoftmax, gradients
from kernels.native import library
from kernels.softmax_stats import (
  NUM_COLUMNS,
  SoftmaxStats,
  StatsKind,
  pack_columns,
  unpack_columns,
)

__all__ = ('gradients', 'keep_softmax', 'kept_gradients', 'obstacle', 'softmax_stats')
TARGET = 'jaxrl_keep_softmax'
KEPT_BYTES = 2**28  # that it may take, less than `rough_memory` counts for logits
TILE_LOGITS = 2**22  # that are held at a time where nothing is kept
TABLE_BLOCK = 1024  # rows of the table whose gradients are computed at a time


def obstacle(hidden: jax.Array) -> str:
  """Returns why the softmax of the logits cannot be kept; '' if it can.

  Args:
    hidden: Hidden states `[…, D]`.
  """
  if hidden.dtype != jnp.float32:
    return f'takes float32, not {hidden.dtype}'
  return library.obstacle()


def softmax_stats(
  hidden: jax.Array,
  table: jax.Array,
  targets: jax.Array,
  inverse: jax.Array,
  *,
  kind: StatsKind,
) -> SoftmaxStats:
  """Computes the softmax statistics of rows over the whole table, in tiles of rows.

  Args:
    hidden: Hidden states `[N, D]` float32.
    table: Table `[V, D]`.
    targets: Index of each target in the table, `[N]` int32; −1 if it is not there.
    inverse: Inverse temperature 1/τ, a float32 scalar.
    kind: Statistics that are read; all are computed.
  """
  count, rows = len(hidden), max(1, TILE_LOGITS // len(table))

  def step(stats, block):
    tile = block.take(hidden, 0), table, block.take(targets, 0), inverse
    new, _ = keep_softmax(*tile, kind=kind)
    return block.put(stats, pack_columns(new), 0)

  stats = jax.lax.empty((count, NUM_COLUMNS), jnp.float32)
  return SoftmaxStats(*unpack_columns(scan_blocks(step, stats, count, rows)))


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
    hidden: As for `softmax_stats`, like all that follow.
    table: As there.
    targets: As there.
    inverse: As there.
    kind: As there.
  """
  del kind
  library.widths()
  logits = jnp.dot(hidden, table.astype(hidden.dtype).T, precision='highest')
  out = [jax.ShapeDtypeStruct(logits.shape, jnp.float32)]
  out += [jax.ShapeDtypeStruct((len(hidden), NUM_COLUMNS), jnp.float32)]
  call = jax.ffi.ffi_call(
    TARGET, out, input_output_aliases={0: 0}, vmap_method='sequential'
  )
  weights, stats = call(logits, targets.astype(jnp.int32), jnp.float32(inverse))
  stats = SoftmaxStats(*unpack_columns(stats))
  return stats, KeptSoftmax(weights, stats.top)


def _product_of_table(weights: jax.Array, rows: jax.Array) -> jax.Array:
  """Computes wᵀ·x of w `[N, V]` and x `[N, D]`, block by block of the vocabulary.

  As one product, XLA would take the bytes of the result twice over, and the same time.
  """

  def step(result, block):
    product = jnp.dot(block.take(weights, 1).T, rows, precision='highest')
    return block.put(result, product, 0)

  vocab = weights.shape[1]
  result = jax.lax.empty((vocab, rows.shape[1]), jnp.float32)
  return scan_blocks(step, result, vocab, TABLE_BLOCK)


kept_gradients = functools.partial(
  kept_softmax.kept_gradients, product_of_table=_product_of_table
)
