"""Fused log-probs run as Pallas kernels on GPU (Triton).

Forward: each program computes the statistics of a block of rows over one share of the
vocabulary; the shares are then merged. Backward: a kernel computes the gradient of the
logits for a chunk of the vocabulary. Two plain matmuls turn it into the gradients of
the table and, some rows at a time, of the hidden states. There are no atomic adds,
whose order would change the last bits from run to run.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels.chunked_logits import scan_blocks
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
)

ROWS, ENTRIES, DEPTH = 64, 128, 32
SHARES = 8  # parts of the vocabulary, so that even a few rows keep the GPU busy
CHUNK = 2048  # vocabulary entries whose logits' gradient is held at a time
ADDED = 2**24  # elements of the states' gradient that are updated at a time


def _logits(hidden, table, rows, entries, sizes):
  """Computes logits `[r, v]` float32 of rows and entries; MASK_VALUE past the table."""
  count, vocab, width = sizes

  def step(k, acc):
    depth = k * DEPTH + jnp.arange(DEPTH)
    inside = depth[None] < width
    a = plgpu.load(
      hidden.at[rows[:, None], depth[None]],
      mask=(rows[:, None] < count) & inside,
      other=0.0,
    )
    b = plgpu.load(
      table.at[entries[:, None], depth[None]],
      mask=(entries[:, None] < vocab) & inside,
      other=0.0,
    ).astype(a.dtype)
    precision = 'highest' if a.dtype == jnp.float32 else None
    return acc + jnp.dot(
      a, b.T, precision=precision, preferred_element_type=jnp.float32
    )

  acc = jnp.zeros((len(rows), len(entries)), jnp.float32)
  acc = jax.lax.fori_loop(0, pl.cdiv(width, DEPTH), step, acc)
  return jnp.where(entries[None] < vocab, acc, MASK_VALUE)


def _forward(inverse, targets, hidden, table, out, *, sizes, kind, steps):
  rows = pl.program_id(0) * ROWS + jnp.arange(ROWS)
  is_row, share = rows < sizes[0], pl.program_id(1)
  target = plgpu.load(targets.at[rows], mask=is_row, other=-1)[:, None]
  scale = plgpu.load(inverse.at[jnp.int32(0)])

  def step(j, before):
    entries = (share * steps + j) * ENTRIES + jnp.arange(ENTRIES)
    logits = _logits(hidden, table, rows, entries, sizes)
    new = block_stats(logits, entries[None] == target, scale, kind)
    return merge_stats(before, new, scale)

  stats = jax.lax.fori_loop(0, steps, step, empty_stats(ROWS))
  for i, column in enumerate(stats):
    plgpu.store(out.at[share, jnp.int32(i), rows], column.sum(1), mask=is_row)


def _backward(inverse, targets, hidden, table, of, out, *, sizes, kind):
  rows = pl.program_id(0) * ROWS + jnp.arange(ROWS)
  entries = pl.program_id(1) * ENTRIES + jnp.arange(ENTRIES)
  is_row = rows < sizes[0]
  target = plgpu.load(targets.at[rows], mask=is_row, other=-1)[:, None]
  row_stats = BackwardStats(
    *(
      plgpu.load(of.at[rows, jnp.int32(i)], mask=is_row, other=0.0)[:, None]
      for i in range(len(BackwardStats._fields))
    )
  )
  logits = _logits(hidden, table, rows, entries, sizes)
  hit = entries[None] == target
  d = logits_grad(logits, hit, row_stats, plgpu.load(inverse.at[jnp.int32(0)]), kind)
  inside = is_row[:, None] & (entries[None] < sizes[1])
  plgpu.store(out.at[rows[:, None], entries[None]], d.astype(out.dtype), mask=inside)


def _call(kernel: Any, *, interpret: bool, **options: Any) -> Any:
  params = None if interpret else plgpu.CompilerParams(num_warps=4, num_stages=3)
  return pl.pallas_call(kernel, compiler_params=params, interpret=interpret, **options)


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
  steps = pl.cdiv(vocab, ENTRIES * SHARES)
  shares = pl.cdiv(vocab, ENTRIES * steps)
  stats = _call(
    functools.partial(_forward, sizes=(count, vocab, width), kind=kind, steps=steps),
    grid=(pl.cdiv(count, ROWS), shares),
    out_shape=jax.ShapeDtypeStruct(
      (shares, len(SoftmaxStats._fields), count), jnp.float32
    ),
    interpret=interpret,
  )(inverse.reshape(1), targets, hidden, table)
  parts = [SoftmaxStats(*(column[:, None] for column in share)) for share in stats]
  return functools.reduce(functools.partial(merge_stats, inverse=inverse), parts)


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
  packed, whole = pack_columns(of), vocab // CHUNK

  def add_chunk(start, size, sums):
    of_hidden, of_table = sums
    part = jax.lax.dynamic_slice_in_dim(table, start, size).astype(hidden.dtype)
    d = _call(
      functools.partial(_backward, sizes=(count, size, width), kind=kind),
      grid=(pl.cdiv(count, ROWS), pl.cdiv(size, ENTRIES)),
      out_shape=jax.ShapeDtypeStruct((count, size), hidden.dtype),
      interpret=interpret,
    )(inverse.reshape(1), targets - start, hidden, part, packed)
    dot = functools.partial(
      jnp.dot,
      precision='highest' if d.dtype == jnp.float32 else None,
      preferred_element_type=jnp.float32,
    )
    new = dot(d.T, hidden).astype(of_table.dtype)
    of_table = jax.lax.dynamic_update_slice_in_dim(of_table, new, start, 0)

    def add(of_hidden, block):
      return block.add(of_hidden, dot(block.take(d, 0), part), 0)

    most = max(ROWS, ADDED // width)
    return scan_blocks(add, of_hidden, count, most, ROWS), of_table

  sums = jnp.zeros((count, width), jnp.float32), jnp.zeros((vocab, width), dtypes[1])
  if whole:
    sums = jax.lax.fori_loop(
      0, whole, lambda i, s: add_chunk(i * CHUNK, CHUNK, s), sums
    )
  if vocab % CHUNK:
    sums = add_chunk(jnp.int32(whole * CHUNK), vocab % CHUNK, sums)
  return sums[0].astype(dtypes[0]), sums[1]
