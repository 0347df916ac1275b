import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.rollout.weights.shards import Region, assemble, flatten, overlap, unflatten
from jaxrl.rollout.weights.snapshots import snapshot


@pytest.fixture(scope='module')
def mesh():
  return jax.make_mesh((4, 2), ('x', 'y'), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def spread(mesh, array, *axes):
  return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))


def test_a_sharded_array_gives_its_pieces_each_once(mesh):
  whole = np.arange(32.0, dtype=np.float32).reshape(8, 4)
  shards = snapshot({'w': spread(mesh, whole, 'x'), 'n': spread(mesh, np.arange(3))})
  boxes = [s.region for s in shards if s.region.name == 'w']
  assert sorted(box.offset for box in boxes) == [(0, 0), (2, 0), (4, 0), (6, 0)]
  assert {box.extent for box in boxes} == {(2, 4)}  # nothing was gathered
  assert [s.region.extent for s in shards if s.region.name == 'n'] == [(3,)]
  arrays = assemble(shards)
  np.testing.assert_array_equal(arrays['w'], whole)
  assert not arrays['w'].flags.writeable


@pytest.mark.parametrize('axes', [(), ('x',), (None, 'y'), ('x', 'y'), (('x', 'y'),)])
def test_any_sharding_meets_any_window(mesh, axes):
  whole = np.arange(8 * 6, dtype=np.float32).reshape(8, 6)
  shards = snapshot({'a': {'w': spread(mesh, whole, *axes)}}, 'bfloat16')
  for window in [(slice(0, 8), slice(0, 3)), (slice(3, 6), slice(2, 6))]:
    part = assemble(shards, {'a.w': window})['a']['w']
    np.testing.assert_array_equal(part, whole[window].astype(ml_dtypes.bfloat16))
    near = [s for s in shards if overlap(s.region, window)]
    np.testing.assert_array_equal(assemble(near, {'a.w': window})['a']['w'], part)


def test_casts_round_alike_on_device_and_host():
  draw = np.random.default_rng(0)
  x = (draw.standard_normal(10_000) * 10.0 ** draw.integers(-30, 30, 10_000)).astype(
    'f4'
  )
  x[:4] = [-0.0, np.inf, -np.inf, 1e-40]
  ours, hosts = (snapshot({'w': y}, 'bfloat16')[0] for y in (jnp.asarray(x), x))
  # XLA on the CPU may flush what is too small to be normal.
  normal = (np.abs(x) >= np.finfo(np.float32).tiny) | (x == 0)
  np.testing.assert_array_equal(ours.bits[normal], hosts.bits[normal])
  np.testing.assert_array_equal(hosts.bits, x.astype(ml_dtypes.bfloat16).view('u2'))


def test_only_real_numbers_are_cast():
  params = {'n': jnp.arange(3), 'b': np.array([True]), 's': np.float64(2.5)}
  kinds = {s.region.name: s.region.dtype for s in snapshot(params, 'bfloat16')}
  assert kinds == {'n': 'int32', 'b': 'bool', 's': 'bfloat16'}
  assert snapshot({'s': np.float32(2.5)})[0].region == Region(
    's', 'float32', (), (), ()
  )


def test_what_is_no_number_is_refused():
  for array in (np.ones(3, np.complex64), np.array(['a']), np.array([None])):
    with pytest.raises(ValueError, match=r'w: weights of dtype .* cannot be sent'):
      snapshot({'w': array})


def test_a_snapshot_outlives_its_source():
  @functools.partial(jax.jit, donate_argnums=0)
  def train(x):
    return x + 1

  host = np.ones(5, np.float32)
  source = jnp.ones((64, 64))
  shards = snapshot({'a': source, 'b': host})
  train(source)
  host[:] = 9
  assert source.is_deleted()
  arrays = assemble(shards)
  assert (arrays['a'] == 1).all() and (arrays['b'] == 1).all()


def test_pieces_that_leave_a_hole_are_refused(mesh):
  shards = snapshot({'w': spread(mesh, np.ones((8, 4)), 'x')})
  with pytest.raises(ValueError, match='w: its pieces cover 24 of 32 elements'):
    assemble(shards[1:])


def test_names_lead_back_to_the_tree():
  tree = {'a': {'b': 1, 'c': {'d': 2}}, 'e': 3}
  assert flatten(tree) == {'a.b': 1, 'a.c.d': 2, 'e': 3}
  assert unflatten(flatten(tree)) == tree
  for bad in ({'a': [1]}, {'a.b': 1}, {1: 1}, {'': 1}):
    with pytest.raises(ValueError, match='nested dicts with plain names'):
      flatten(bad)


def test_chunks_are_bounded_and_cover():
  box = Region('w', 'float32', (100,), (0,), (100,))
  assert list(box.chunk_bounds(160)) == [(0, 40), (40, 40), (80, 20)]
  assert list(box.chunk_bounds(1))[:2] == [(0, 1), (1, 1)]
  assert list(Region('z', 'float32', (0, 3), (0, 0), (0, 3)).chunk_bounds(64)) == []
