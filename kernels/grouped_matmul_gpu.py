"""Grouped matmul with Pallas for GPU (Triton): each group of rows times its own matrix.

XLA expands `jax.lax.ragged_dot` for GPUs (as of jax 0.10) to every matrix for every
row. Here a program takes a tile of one group's rows to its own matrix; which tile
belongs to which group is found at run time, and the grid has room for the most tiles
there may be. The gradient of a matrix is summed by one program over its group's rows:
no atomic sums.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

ROWS, COLUMNS, DEPTH = 128, 128, 32
SUMMED = 64  # of a matrix's rows, each with COLUMNS of its columns, in a program


def grouped_dot(
  rows: jax.Array, matrices: jax.Array, sizes: jax.Array, interpret: bool = False
) -> jax.Array:
  """Computes `jax.lax.ragged_dot`: rows of group g times matrices[g].

  Args:
    rows: `[M, D]` float32 or bfloat16.
    matrices: `[G, D, O]` of rows' dtype.
    sizes: `[G]` int32, M in sum or less.
    interpret: Whether to interpret the kernel, without an accelerator.

  Returns:
    `[M, O]` of rows' dtype, summed in float32, and 0 behind the last group.
  """
  return _dot_of_groups(rows, matrices, sizes, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _dot_of_groups(rows, matrices, sizes, interpret):
  return _product(rows, matrices, sizes, transposed=False, interpret=interpret)


def _fwd(rows, matrices, sizes, interpret):
  return _dot_of_groups(rows, matrices, sizes, interpret), (rows, matrices, sizes)


def _bwd(interpret, kept, slope):
  rows, matrices, sizes = kept
  of_rows = _product(slope, matrices, sizes, transposed=True, interpret=interpret)
  return of_rows, _outer(rows, slope, sizes, interpret=interpret), None


_dot_of_groups.defvjp(_fwd, _bwd)


def _product(rows, matrices, sizes, *, transposed: bool, interpret: bool) -> jax.Array:
  """transposed: rows times each matrix's transpose."""
  (count, depth), (groups, *shape) = rows.shape, matrices.shape
  width = shape[0] if transposed else shape[1]
  most = count // ROWS + groups
  product = _call(
    functools.partial(_tile, transposed=transposed),
    name='grouped_dot',
    flops=2 * count * depth * width,
    grid=(most, pl.cdiv(width, COLUMNS)),
    out_shape=jax.ShapeDtypeStruct((count, width), rows.dtype),
    interpret=interpret,
  )(_tiles(sizes, most), rows, matrices)
  return jnp.where((jnp.arange(count) < sizes.sum())[:, None], product, 0)


def _outer(rows, slope, sizes, *, interpret: bool) -> jax.Array:
  """`[G, D, O]`: of each group, its rows' transpose times its slopes."""
  (count, depth), width = rows.shape, slope.shape[1]
  ends = jnp.cumsum(sizes)
  return _call(
    _summed,
    name='grouped_outer',
    flops=2 * count * depth * width,
    grid=(len(sizes), pl.cdiv(depth, SUMMED), pl.cdiv(width, COLUMNS)),
    out_shape=jax.ShapeDtypeStruct((len(sizes), depth, width), rows.dtype),
    interpret=interpret,
  )(jnp.stack([ends - sizes, ends]), rows, slope)


def _tiles(sizes: jax.Array, most: int) -> jax.Array:
  """`[3, most]` int32: of each tile its group, its first row and its group's end.

  Those that are not needed end where they begin.
  """
  tiles, ends = (sizes + ROWS - 1) // ROWS, jnp.cumsum(sizes)
  last = jnp.cumsum(tiles)
  place = jnp.arange(most, dtype=jnp.int32)
  group = jnp.searchsorted(last, place, side='right').astype(jnp.int32)
  needed, group = group < len(sizes), jnp.minimum(group, len(sizes) - 1)
  start = ends[group] - sizes[group] + (place - last[group] + tiles[group]) * ROWS
  spans = jnp.where(needed, jnp.stack([start, ends[group]]), 0)
  return jnp.concatenate([group[None], spans]).astype(jnp.int32)


def _tile(tiles, rows, matrices, out, *, transposed):
  place, column = pl.program_id(0), pl.program_id(1) * COLUMNS + jnp.arange(COLUMNS)
  group, start, end = (plgpu.load(tiles.at[jnp.int32(i), place]) for i in range(3))
  row, (depth, width) = start + jnp.arange(ROWS), (rows.shape[1], out.shape[1])
  is_row, inside = (row < end)[:, None], (column < width)

  def step(k, total):
    d = k * DEPTH + jnp.arange(DEPTH)
    a = plgpu.load(
      rows.at[row[:, None], d[None]], mask=is_row & (d < depth)[None], other=0.0
    )
    if transposed:
      block = matrices.at[group, column[:, None], d[None]]
      b = plgpu.load(block, mask=inside[:, None] & (d < depth)[None], other=0.0).T
    else:
      block = matrices.at[group, d[:, None], column[None]]
      b = plgpu.load(block, mask=(d < depth)[:, None] & inside[None], other=0.0)
    return total + _dot(a, b)

  steps = jnp.minimum(end - start, 1) * pl.cdiv(depth, DEPTH)  # 0 where not needed
  total = jnp.zeros((ROWS, COLUMNS), jnp.float32)
  total = jax.lax.fori_loop(0, steps, step, total)
  place = out.at[row[:, None], column[None]]
  plgpu.store(place, total.astype(out.dtype), mask=is_row & inside[None])


def _summed(spans, rows, slope, out):
  group = pl.program_id(0)
  start, end = (plgpu.load(spans.at[jnp.int32(i), group]) for i in range(2))
  d = pl.program_id(1) * SUMMED + jnp.arange(SUMMED)
  column = pl.program_id(2) * COLUMNS + jnp.arange(COLUMNS)
  deep, wide = (d < out.shape[1])[None], (column < out.shape[2])[None]

  def step(k, total):
    row = start + k * DEPTH + jnp.arange(DEPTH)
    is_row = (row < end)[:, None]
    a = plgpu.load(rows.at[row[:, None], d[None]], mask=is_row & deep, other=0.0)
    b = plgpu.load(slope.at[row[:, None], column[None]], mask=is_row & wide, other=0.0)
    return total + _dot(a.T, b)

  total = jnp.zeros((SUMMED, COLUMNS), jnp.float32)
  total = jax.lax.fori_loop(0, pl.cdiv(end - start, DEPTH), step, total)
  place = out.at[group, d[:, None], column[None]]
  plgpu.store(place, total.astype(out.dtype), mask=deep.T & wide)


def _dot(a, b):
  precision = 'highest' if a.dtype == jnp.float32 else None
  return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def _call(kernel: Any, *, flops: int, interpret: bool, **options: Any) -> Any:
  params = None if interpret else plgpu.CompilerParams(num_warps=8, num_stages=3)
  cost = pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=0)
  return pl.pallas_call(
    kernel,
    compiler_params=params,
    cost_estimate=cost,
    interpret=interpret,
    **options,
  )
