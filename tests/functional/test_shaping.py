"""Shaping formulas by hand, and the same from numpy as from JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.functional import shaping

LENGTHS = np.array([10.0, 20.0, 30.0])
CALLS = [
  (shaping.overlong_penalty, {'max_length': 30, 'cache': 20}, [0, -0.5, -1]),
  (shaping.overlong_penalty, {'max_length': 25}, [0, 0, -1]),
  (shaping.length_weights, {}, [4 / 3, 1, 2 / 3]),
  (shaping.length_weights, {'shortest': 0.0, 'longest': 1.0}, [0, 1, 2]),
  (shaping.difficulty_weights, {'easy': 0.0, 'hard': 30.0}, [-270, -570, -870]),
  (
    shaping.rescale,
    {'add': 2, 'subtract': 12, 'multiply': 3, 'divide': 2},
    [0, 15, 30],
  ),
  (shaping.rescale, {'divide': 0.0}, [10, 20, 30]),
]


@pytest.mark.parametrize(('fn', 'options', 'wanted'), CALLS)
def test_by_hand_on_the_host_and_jitted(fn, options, wanted):
  host = fn(LENGTHS, **options)
  assert isinstance(host, np.ndarray)
  np.testing.assert_allclose(host, wanted, rtol=1e-6)
  device = jax.jit(lambda x: fn(x, **options))(jnp.asarray(LENGTHS))
  np.testing.assert_allclose(device, wanted, rtol=1e-6)


def test_operands_may_differ_by_row():
  out = shaping.rescale(LENGTHS, divide=np.array([5.0, 0.0, 3.0]))
  np.testing.assert_allclose(out, [2, 20, 10])


def test_lengths_need_some_weight():
  with pytest.raises(ValueError, match='both 0'):
    shaping.length_weights(LENGTHS, shortest=0.0, longest=0.0)
