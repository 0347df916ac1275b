"""Grouped products for GPU, against `jax.lax.ragged_dot` and float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import grouped_matmul
from tests.marks import slow, slow_except

# Rows, depth, width, and the sizes of groups: none, one row, more than a tile.
SHAPES = {
  'odd': (301, 37, 139, [0, 1, 150, 0, 97, 53]),
  'rows of nobody': (260, 33, 20, [129, 0, 100]),
  'whole tiles': (256, 32, 128, [128, 128]),
  'nothing': (5, 16, 16, [0, 0]),
}


def arrays(shape, dtype='float32'):
  rows, depth, width, sizes = SHAPES[shape]
  draw = np.random.default_rng(0)
  x = draw.standard_normal((rows, depth))
  w = draw.standard_normal((len(sizes), depth, width))
  return jnp.asarray(x, dtype), jnp.asarray(w, dtype), jnp.asarray(sizes, jnp.int32)


def by_hand(x, w, sizes, toward):
  """Product, and the gradients of its sum weighed by `toward`, in float64."""
  x, w = np.float64(x), np.float64(w)
  y, dx, dw, start = np.zeros(toward.shape), np.zeros_like(x), np.zeros_like(w), 0
  for g, size in enumerate(np.asarray(sizes)):
    group = slice(start, start + size)
    y[group], dx[group] = x[group] @ w[g], toward[group] @ w[g].T
    dw[g], start = x[group].T @ toward[group], start + size
  return y, dx, dw


@pytest.mark.parametrize('shape', slow_except(('odd', 'rows of nobody'), SHAPES))
@pytest.mark.parametrize(('dtype', 'rtol'), [('float32', 1e-6), slow('bfloat16', 8e-3)])
def test_value_and_gradient_equal_float64(shape, dtype, rtol):
  x, w, sizes = arrays(shape, dtype)
  toward = np.random.default_rng(1).standard_normal((len(x), w.shape[2]))
  toward = jnp.asarray(toward, dtype)

  @jax.jit
  def both_ways(x, w, toward):
    y, pull = jax.vjp(lambda x, w: grouped_matmul.grouped_dot(x, w, sizes), x, w)
    return y, *pull(toward)

  for actual, expected in zip(
    both_ways(x, w, toward), by_hand(x, w, sizes, np.float64(toward)), strict=True
  ):
    assert actual.dtype == dtype
    scale = np.abs(expected).max() + 1e-9
    np.testing.assert_allclose(np.float64(actual), expected, atol=rtol * scale)


def test_it_is_the_ragged_product():
  x, w, sizes = arrays('odd')
  expected = jax.lax.ragged_dot(x, w, sizes)
  product = grouped_matmul.grouped_dot(x, w, sizes)
  np.testing.assert_allclose(product, expected, atol=1e-4)


def test_every_row_is_in_one_tile_of_its_group():
  sizes = np.array([0, 1, 300, 128, 0, 27])

  def step(seen, index, is_row):
    groups = np.broadcast_to(np.arange(len(sizes))[:, None], index.shape)
    return seen.at[jnp.where(is_row, index, len(seen))].add(groups + 1, mode='drop')

  seen = grouped_matmul._by_tiles(step, jnp.zeros(460, int), jnp.asarray(sizes), 460)
  expected = np.repeat(np.arange(len(sizes)), sizes) + 1
  np.testing.assert_array_equal(seen, np.append(expected, [0] * 4))


def test_rounds_are_those_of_the_largest_group():
  """A tile is half of the average group; two programs, of one of two groups."""
  x, w = jnp.ones((64, 4)), jnp.ones((2, 4, 3))
  for sizes, rounds in (([32, 32], 2), ([64, 0], 4), ([0, 0], 0), ([1, 17], 2)):
    seen = []

    def step(carry, index, _, seen=seen):
      jax.debug.callback(lambda i: seen.append(i.shape), index)
      return carry

    sizes = jnp.asarray(sizes, jnp.int32)
    jax.block_until_ready(grouped_matmul._by_tiles(step, x.sum(), sizes, len(x)))
    jax.effects_barrier()
    assert seen == [(2, 16)] * rounds
    assert grouped_matmul.grouped_dot(x, w, sizes).sum() == 12 * sizes.sum()
