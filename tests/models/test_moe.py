"""How a mixture of experts is computed, on which platform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models import moe
from kernels import experts

WAYS = (experts.dense, experts.ragged)


@pytest.mark.parametrize(
  ('shape', 'asked', 'platform', 'wanted'),
  [
    ((2, 5, 8), 'auto', 'tpu', experts.ragged),
    ((2, 5, 8), 'auto', 'cuda', experts.ragged),
    ((2, 5, 8), 'auto', 'cpu', experts.dense),
    ((10, 8), 'auto', 'tpu', experts.dense),
    ((2, 5, 8), 'reference', 'tpu', experts.dense),
  ],
)
def test_the_way_is_the_platforms_unless_the_reference_is_asked_for(
  shape, asked, platform, wanted
):
  assert moe.way(jnp.zeros(shape), asked, platform) is wanted


@pytest.mark.parametrize('tokens', [1, 7, 32])
def test_both_ways_are_one_function(tokens):
  keys = jax.random.split(jax.random.key(tokens), 6)
  x = jax.random.normal(keys[0], (tokens, 8))
  chosen = jax.random.permutation(
    keys[1], jnp.tile(jnp.arange(4), (tokens, 1)), 1, True
  )
  chosen = chosen[:, :2].at[0, 0].set(9)  # nobody's
  weights = jax.random.uniform(keys[2], (tokens, 2))
  matrices = [
    jax.random.normal(key, shape)
    for key, shape in zip(keys[3:], [(4, 8, 6), (4, 8, 6), (4, 6, 8)], strict=True)
  ]

  def total(way, x, weights, *matrices):
    y = way(x, chosen, weights, *matrices)
    return (y * jnp.cos(jnp.arange(y.size).reshape(y.shape))).sum(), y

  def run(way):
    slope = jax.grad(total, argnums=(1, 2, 3, 4, 5), has_aux=True)
    return slope(way, x, weights, *matrices)

  for one, two in zip(*(jax.tree.leaves(run(way)) for way in WAYS), strict=True):
    np.testing.assert_allclose(one, two, rtol=2e-5, atol=2e-5)
