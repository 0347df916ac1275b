"""Grouped matmul multiplies each group of rows by its own matrix, with Pallas on GPU.

On GPU, XLA expands `jax.lax.ragged_dot` (as of jax 0.10) to multiply every row by every
matrix. Here each program multiplies a tile of rows of one group by the matrix of that
group. The tiles are assigned to groups at run time, and the grid is large enough for
the largest possible number of tiles. For the gradient of the matrices, one program sums
each block over all rows of its group, without atomic adds.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

ROWS, COLUMNS, DEPTH = 128, 128, 32
SUMMED = 64  # rows of a matrix gradient's [SUMMED, COLUMNS] block, one per program


def grouped_dot(
  rows: jax.Array, matrices: jax.Array, sizes: jax.Array, interpret: bool = False
) -> jax.Array:
  """Computes `jax.lax.ragged_dot`: the rows of group g times `matrices[g]`.

  Args:
    rows: Rows sorted by group, `[M, D]` float32 or bfloat16.
    matrices: Matrix of each group, `[G, D, O]` in the dtype of `rows`.
    sizes: Number of rows of each group, `[G]` int32; their sum is at most M.
    interpret: Whether to run the kernel in Pallas's interpreter, without an
      accelerator.

  Returns:
    The products `[M, O]` in the dtype of `rows`, summed in float32; 0 after the last
    group.
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
  """Multiplies the rows of each group by its matrix, or by the transpose of it."""
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
  """Computes the gradient of the matrices, `[G, D, O]`: rowsᵀ · slope per group."""
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
  """Assigns tiles of rows to groups.

  Returns:
    `[3, most]` int32: the group of each tile, its first row and the end of its group.
    In an unused tile, the first row equals the end.
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

  steps = jnp.minimum(end - start, 1) * pl.cdiv(depth, DEPTH)  # 0 in an unused tile
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
