"""Grouped matmul multiplies each group of rows by its own matrix, in plain jnp on GPU.

On GPU, XLA expands `jax.lax.ragged_dot` (as of jax 0.12) to multiply every row by every
matrix. Here the groups advance together: each round is one batched product of the next
tile of every group with the matrix of that group. There are as many rounds as the
largest group has tiles, so the work grows with the size of the largest group: G times
the largest group, rounded up to a tile. If a tile is half of the average group, that is
the useful work times about the ratio of the largest to the average group, plus a
quarter. Nothing is added up in an order that could vary.
"""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

T = TypeVar('T')

MULTIPLE = 16  # of rows in a tile
TILES = 2  # of a group of average size


def grouped_dot(rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
  """Computes `jax.lax.ragged_dot`: the rows of group g times `matrices[g]`.

  Args:
    rows: Rows sorted by group, `[M, D]` float32 or bfloat16.
    matrices: Matrix of each group, `[G, D, O]` in the dtype of `rows`.
    sizes: Number of rows of each group, `[G]` int32; their sum is at most M.

  Returns:
    The products `[M, O]` in the dtype of `rows`, summed in float32; 0 after the last
    group.
  """
  return _dot_of_groups(rows, matrices, sizes)


@jax.custom_vjp
def _dot_of_groups(rows, matrices, sizes):
  return grouped_product(rows, matrices, sizes)


def _fwd(rows, matrices, sizes):
  return _dot_of_groups(rows, matrices, sizes), (rows, matrices, sizes)


def _bwd(kept, slope):
  rows, matrices, sizes = kept
  of_rows = grouped_product(slope, matrices.swapaxes(1, 2), sizes)
  return of_rows, grouped_outer(rows, slope, sizes), None


_dot_of_groups.defvjp(_fwd, _bwd)


# Both are compiled as functions of their own so that they have a name in a program, by
# which `launch.planning.flops` counts a loop whose length only the data say.
@jax.jit
def grouped_product(
  rows: jax.Array, matrices: jax.Array, sizes: jax.Array
) -> jax.Array:
  """Computes `grouped_dot` without a gradient."""

  def step(out, index, is_row):
    a = _take(rows, index, is_row)
    new = _dot('gtd,gdo->gto', a, matrices).astype(out.dtype)
    # Indices past the end are dropped, and differ as all others do.
    past = len(rows) + jnp.arange(index.size).reshape(index.shape)
    where = jnp.where(is_row, index, past)
    return out.at[where].set(new, mode='drop', unique_indices=True)

  out = jnp.zeros((len(rows), matrices.shape[2]), rows.dtype)
  return _by_tiles(step, out, sizes, len(rows))


@jax.jit
def grouped_outer(rows: jax.Array, slope: jax.Array, sizes: jax.Array) -> jax.Array:
  """Computes the gradient of the matrices, `[G, D, O]`: rowsᵀ · slope per group.

  Args:
    rows: Rows sorted by group, `[M, D]`.
    slope: Gradient of their products, `[M, O]`.
    sizes: Number of rows of each group, `[G]` int32.
  """

  def step(total, index, is_row):
    a, b = _take(rows, index, is_row), _take(slope, index, is_row)
    return total + _dot('gtd,gto->gdo', a, b)

  total = jnp.zeros((len(sizes), rows.shape[1], slope.shape[1]), jnp.float32)
  return _by_tiles(step, total, sizes, len(rows)).astype(rows.dtype)


def _by_tiles(
  step: Callable[[T, jax.Array, jax.Array], T], carry: T, sizes: jax.Array, count: int
) -> T:
  """Runs `step(carry, index, is_row)` for the tiles of all groups, in turn.

  `index` has the rows of each group's next tile, `[G, tile]` int32, and `is_row` says
  which of them there are.
  """
  tile = -(-count // (TILES * len(sizes) * MULTIPLE)) * MULTIPLE
  ends = jnp.cumsum(sizes)
  starts = ends - sizes

  def body(i, carry):
    index = starts[:, None] + i * tile + jnp.arange(tile, dtype=jnp.int32)
    return step(carry, index, index < ends[:, None])

  return jax.lax.fori_loop(0, -(-sizes.max() // tile), body, carry)


def _take(x: jax.Array, index: jax.Array, is_row: jax.Array) -> jax.Array:
  """Gathers rows, and zeros where there are none."""
  return jnp.where(is_row[..., None], x.at[index].get(mode='clip'), 0)


def _dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  return product(spec, a, b, precision='highest' if a.dtype == jnp.float32 else None)
