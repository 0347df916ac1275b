"""Sums over the vocabulary and their gradients with Pallas kernels for GPU (Triton).

Forward: a program takes a few rows through its share of the vocabulary, and the shares
are merged. Backward: a kernel makes the gradient of some entries' logits, which two
plain matrix products then turn into those of the table and, some rows at a time, of the
states: no atomic sums, whose order would change the last bits from run to run.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels.blocks import each_block
from kernels.vocabulary import (
  NEGATIVE,
  Kind,
  Slopes,
  Sums,
  dlogits,
  merge,
  nothing,
  pack,
  sums,
)

ROWS, ENTRIES, DEPTH = 64, 128, 32
SHARES = 8  # of the vocabulary, so that few rows too keep the GPU busy
CHUNK = 2048  # entries whose logits' gradients are held at a time
ADDED = 2**24  # numbers of the states' gradient that are added at a time


def _logits(hidden, table, rows, entries, sizes):
  """`[r, v]` float32 of the given rows and entries; NEGATIVE beyond the vocabulary."""
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
  return jnp.where(entries[None] < vocab, acc, NEGATIVE)


def _forward(inverse, targets, hidden, table, out, *, sizes, kind, steps):
  rows = pl.program_id(0) * ROWS + jnp.arange(ROWS)
  there, share = rows < sizes[0], pl.program_id(1)
  target = plgpu.load(targets.at[rows], mask=there, other=-1)[:, None]
  scale = plgpu.load(inverse.at[jnp.int32(0)])

  def step(j, before):
    entries = (share * steps + j) * ENTRIES + jnp.arange(ENTRIES)
    logits = _logits(hidden, table, rows, entries, sizes)
    new = sums(logits, entries[None] == target, scale, kind)
    return merge(before, new, scale)

  found = jax.lax.fori_loop(0, steps, step, nothing(ROWS))
  for i, column in enumerate(found):
    plgpu.store(out.at[share, jnp.int32(i), rows], column.sum(1), mask=there)


def _backward(inverse, targets, hidden, table, of, out, *, sizes, kind):
  rows = pl.program_id(0) * ROWS + jnp.arange(ROWS)
  entries = pl.program_id(1) * ENTRIES + jnp.arange(ENTRIES)
  there = rows < sizes[0]
  target = plgpu.load(targets.at[rows], mask=there, other=-1)[:, None]
  own = Slopes(
    *(
      plgpu.load(of.at[rows, jnp.int32(i)], mask=there, other=0.0)[:, None]
      for i in range(len(Slopes._fields))
    )
  )
  logits = _logits(hidden, table, rows, entries, sizes)
  hit = entries[None] == target
  d = dlogits(logits, hit, own, plgpu.load(inverse.at[jnp.int32(0)]), kind)
  inside = there[:, None] & (entries[None] < sizes[1])
  plgpu.store(out.at[rows[:, None], entries[None]], d.astype(out.dtype), mask=inside)


def _call(kernel: Any, *, interpret: bool, **options: Any) -> Any:
  params = None if interpret else plgpu.CompilerParams(num_warps=4, num_stages=3)
  return pl.pallas_call(kernel, compiler_params=params, interpret=interpret, **options)


def total(
  hidden: jax.Array,
  table: jax.Array,
  targets: jax.Array,
  inverse: jax.Array,
  *,
  kind: Kind,
  interpret: bool = False,
) -> Sums:
  """As `vocabulary_tpu.total`."""
  (count, width), vocab = hidden.shape, len(table)
  steps = pl.cdiv(vocab, ENTRIES * SHARES)
  shares = pl.cdiv(vocab, ENTRIES * steps)
  found = _call(
    functools.partial(_forward, sizes=(count, vocab, width), kind=kind, steps=steps),
    grid=(pl.cdiv(count, ROWS), shares),
    out_shape=jax.ShapeDtypeStruct((shares, len(Sums._fields), count), jnp.float32),
    interpret=interpret,
  )(inverse.reshape(1), targets, hidden, table)
  parts = [Sums(*(column[:, None] for column in share)) for share in found]
  return functools.reduce(functools.partial(merge, inverse=inverse), parts)


def gradients(
  hidden: jax.Array,
  table: jax.Array,
  targets: jax.Array,
  inverse: jax.Array,
  of: Slopes,
  *,
  kind: Kind,
  dtypes: tuple[Any, Any],
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """As `vocabulary_tpu.gradients`."""
  (count, width), vocab = hidden.shape, len(table)
  packed, whole = pack(of), vocab // CHUNK

  def some(start, size, sums):
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
    return each_block(add, of_hidden, count, most, ROWS), of_table

  sums = jnp.zeros((count, width), jnp.float32), jnp.zeros((vocab, width), dtypes[1])
  if whole:
    sums = jax.lax.fori_loop(0, whole, lambda i, s: some(i * CHUNK, CHUNK, s), sums)
  if vocab % CHUNK:
    sums = some(jnp.int32(whole * CHUNK), vocab % CHUNK, sums)
  return sums[0].astype(dtypes[0]), sums[1]
