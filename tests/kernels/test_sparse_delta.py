"""Changed elements: found as by the reference, and put back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.sparse_delta import extract, reference, scatter


def arrays(dtype, changes, size=(7, 13)):
  generator = np.random.default_rng(changes)
  old = jnp.asarray(generator.normal(size=size), dtype)
  places = generator.choice(old.size, changes, replace=False)
  new = old.reshape(-1).at[places].add(jnp.asarray(0.5, dtype)).reshape(size)
  return old, new, np.sort(places)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize('changes', [0, 1, 20, 91])
def test_changes_are_found_and_put_back(dtype, changes):
  old, new, places = arrays(dtype, changes)
  delta, wanted = (
    jax.jit(find, static_argnames='capacity')(old, new, capacity=91)
    for find in (extract, reference)
  )
  assert int(delta.count) == changes
  indices = np.asarray(delta.indices)
  np.testing.assert_array_equal(indices[:changes], places)
  assert (indices[changes:] == old.size).all()
  jax.tree.map(np.testing.assert_array_equal, delta, wanted)
  np.testing.assert_array_equal(jax.jit(scatter)(old, delta), new)


@pytest.mark.parametrize('find', [extract, reference])
def test_a_delta_that_is_not_whole_tells(find):
  old, new, places = arrays(jnp.float32, 20)
  delta = find(old, new, capacity=6)
  assert int(delta.count) == 20
  np.testing.assert_array_equal(delta.indices, places[:6])


def test_bits_are_compared():
  old = jnp.array([0.0, jnp.nan, jnp.inf, 1.0])
  delta = extract(old, jnp.array([-0.0, jnp.nan, -jnp.inf, 1.0]), capacity=4)
  assert int(delta.count) == 2
  np.testing.assert_array_equal(delta.indices, [0, 2, 4, 4])
  assert np.signbit(np.asarray(scatter(old, delta))[[0, 2]]).all()


def test_other_arrays_are_refused():
  with pytest.raises(ValueError, match='one shape and dtype'):
    extract(jnp.zeros(3), jnp.zeros(4), capacity=1)
