"""Fused log-probs run as Pallas kernels on TPU.

A block of logits is computed in VMEM, used there and discarded. The backward pass
recomputes it twice: once for the gradient of the hidden states and once for the
gradient of the table.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.softmax_stats import (
  MASK_VALUE,
  BackwardStats,
  SoftmaxStats,
  StatsKind,
  block_stats,
  empty_stats,
  logits_grad,
  merge_stats,
  pack_columns,
  unpack_columns,
)

BLOCK_BYTES = 2**21  # size of a block of the table, or of the states, in float32
VMEM = 48 * 2**20


def block_sizes(rows: int, vocab: int, width: int) -> tuple[int, int]:
  """Returns the numbers of rows and of vocabulary entries per block.

  Args:
    rows: Total number of rows.
    vocab: Size of the vocabulary.
    width: Width of the hidden states.
  """
  fit = max(128, BLOCK_BYTES // (4 * width) // 128 * 128)
  return min(min(512, fit), _up(rows, 16)), min(min(512, fit), _up(vocab, 128))


def _up(x: int, multiple: int) -> int:
  return -(-x // multiple) * multiple


class LogitsBlock:
  """A block of logits, with its states `[r, D]` and its part of the table `[v, D]`.

  Rows and vocabulary entries past the ends of the arrays are masked.
  """

  def __init__(self, refs, row, entry, sizes):
    inverse, targets, hidden, table = refs
    rows, vocab = hidden.shape[0], table.shape[0]
    hidden, table = hidden[...], table[...].astype(hidden.dtype)
    if sizes[0] % rows:  # padding past the end may hold anything, even NaN
      there = jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0) + row * rows
      hidden = jnp.where(there < sizes[0], hidden, jnp.zeros_like(hidden))
    ids = jax.lax.broadcasted_iota(jnp.int32, (rows, vocab), 1) + entry * vocab
    if sizes[1] % vocab:
      there = jax.lax.broadcasted_iota(jnp.int32, (vocab, 1), 0) + entry * vocab
      table = jnp.where(there < sizes[1], table, jnp.zeros_like(table))
    self.hidden, self.table = hidden, table
    self.inverse = inverse[0, 0]
    self.hit = ids == targets[...]
    logits = _dot(hidden, table, 1, 1)
    self.logits = jnp.where(ids < sizes[1], logits, MASK_VALUE)


def _dot(a: jax.Array, b: jax.Array, i: int, j: int) -> jax.Array:
  precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return jax.lax.dot_general(
    a,
    b,
    (((i,), (j,)), ((), ())),
    precision=precision,
    preferred_element_type=jnp.float32,
  )


def _forward(*refs: Any, sizes: tuple[int, int], kind: StatsKind) -> None:
  *inputs, out = refs
  row, entry = pl.program_id(0), pl.program_id(1)

  @pl.when(entry == 0)
  def _():
    for i, column in enumerate(empty_stats(out.shape[0])):
      out[:, i : i + 1] = column

  block = LogitsBlock(inputs, row, entry, sizes)
  new = block_stats(block.logits, block.hit, block.inverse, kind)
  before = SoftmaxStats(*(out[:, i : i + 1] for i in range(len(new))))
  for i, column in enumerate(merge_stats(before, new, block.inverse)):
    out[:, i : i + 1] = column


def _backward(
  *refs: Any, sizes: tuple[int, int], kind: StatsKind, of_table: bool, last: int
) -> None:
  *inputs, of, out, total = refs
  outer, inner = pl.program_id(0), pl.program_id(1)

  @pl.when(inner == 0)
  def _():
    total[...] = jnp.zeros_like(total)

  row, entry = (inner, outer) if of_table else (outer, inner)
  block = LogitsBlock(inputs, row, entry, sizes)
  row_stats = BackwardStats(*(of[:, i : i + 1] for i in range(of.shape[1])))
  if sizes[0] % block.hidden.shape[0]:
    rows = block.hidden.shape[0]
    there = jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0) + row * rows < sizes[0]
    row_stats = BackwardStats(*(jnp.where(there, x, 0.0) for x in row_stats))
  d = logits_grad(block.logits, block.hit, row_stats, block.inverse, kind)
  d = d.astype(block.hidden.dtype)
  if of_table:
    total[...] += _dot(d, block.hidden, 0, 0)
  else:
    total[...] += _dot(d, block.table, 1, 0)

  @pl.when(inner == last)
  def _():
    out[...] = total[...].astype(out.dtype)


def _specs(rows: int, vocab: int, width: int, turned: bool) -> list[pl.BlockSpec]:
  """Returns the block specs of inverse temperature, targets, states and table.

  Args:
    rows: Rows per block.
    vocab: Vocabulary entries per block.
    width: Width of the hidden states.
    turned: Whether the vocabulary is the first axis of the grid, instead of the rows.
  """

  def at(index):
    return (lambda i, j: index(j, i)) if turned else index

  return [
    pl.BlockSpec(memory_space=pltpu.SMEM),
    pl.BlockSpec((rows, 1), at(lambda i, j: (i, 0))),
    pl.BlockSpec((rows, width), at(lambda i, j: (i, 0))),
    pl.BlockSpec((vocab, width), at(lambda i, j: (j, 0))),
  ]


def _params() -> pltpu.CompilerParams:
  return pltpu.CompilerParams(
    dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=VMEM
  )


def softmax_stats(
  hidden: jax.Array,
  table: jax.Array,
  targets: jax.Array,
  inverse: jax.Array,
  *,
  kind: StatsKind,
  interpret: bool = False,
) -> SoftmaxStats:
  """Computes the softmax statistics of rows over the whole table.

  Args:
    hidden: Hidden states `[N, D]`.
    table: Table `[V, D]`.
    targets: Index of each target in the table, `[N]` int32; −1 if it is not there.
    inverse: Inverse temperature 1/τ, a float32 scalar.
    kind: Statistics to compute.
    interpret: Whether to run the kernel in Pallas's interpreter, without an
      accelerator.
  """
  (count, width), vocab = hidden.shape, len(table)
  rows, entries = block_sizes(count, vocab, width)
  stats = pl.pallas_call(
    functools.partial(_forward, sizes=(count, vocab), kind=kind),
    grid=(pl.cdiv(count, rows), pl.cdiv(vocab, entries)),
    in_specs=_specs(rows, entries, width, False),
    out_specs=pl.BlockSpec((rows, len(SoftmaxStats._fields)), lambda i, j: (i, 0)),
    out_shape=jax.ShapeDtypeStruct((count, len(SoftmaxStats._fields)), jnp.float32),
    compiler_params=_params(),
    interpret=interpret,
  )(inverse.reshape(1, 1), targets[:, None], hidden, table)
  return SoftmaxStats(*unpack_columns(stats))


def gradients(
  hidden: jax.Array,
  table: jax.Array,
  targets: jax.Array,
  inverse: jax.Array,
  of: BackwardStats,
  *,
  kind: StatsKind,
  dtypes: tuple[Any, Any],
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Computes the gradients of the hidden states and the table.

  Args:
    hidden: Hidden states `[N, D]`.
    table: Table `[V, D]`.
    targets: Index of each target in the table, `[N]` int32; −1 if it is not there.
    inverse: Inverse temperature 1/τ, a float32 scalar.
    of: Backward statistics of the rows.
    kind: Statistics that were computed.
    dtypes: Dtypes of the two gradients.
    interpret: Whether to run the kernel in Pallas's interpreter, without an
      accelerator.

  Returns:
    The gradients `[N, D]` and `[V, D]`, in `dtypes`.
  """
  (count, width), vocab = hidden.shape, len(table)
  rows, entries = block_sizes(count, vocab, width)
  grid = pl.cdiv(count, rows), pl.cdiv(vocab, entries)

  def run(of_table: bool) -> jax.Array:
    size, all_of = (entries, vocab) if of_table else (rows, count)
    order = grid[::-1] if of_table else grid
    rows_at = (lambda i, j: (j, 0)) if of_table else (lambda i, j: (i, 0))
    return pl.pallas_call(
      functools.partial(
        _backward,
        sizes=(count, vocab),
        kind=kind,
        of_table=of_table,
        last=order[1] - 1,
      ),
      grid=order,
      in_specs=[
        *_specs(rows, entries, width, of_table),
        pl.BlockSpec((rows, len(of)), rows_at),
      ],
      out_specs=pl.BlockSpec((size, width), lambda i, j: (i, 0)),
      out_shape=jax.ShapeDtypeStruct((all_of, width), dtypes[of_table]),
      scratch_shapes=[pltpu.VMEM((size, width), jnp.float32)],
      compiler_params=_params(),
      interpret=interpret,
    )(inverse.reshape(1, 1), targets[:, None], hidden, table, pack_columns(of))

  return run(False), run(True)
