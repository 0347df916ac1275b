import asyncio
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxrl.device_thread import DeviceThread
from jaxrl.rollout.weights.weight_store import InProcessOptions, InProcessWeightStore


@pytest.fixture
def device_thread():
  device_thread = DeviceThread()
  yield device_thread
  device_thread.close()


def params(value=1.0):
  return {
    'a': {'kernel': jnp.full((8, 4), value)},
    'b': jnp.arange(5.0) * value,
    'n': jnp.arange(3),
  }


@functools.partial(jax.jit, donate_argnums=0)
def train(tree):
  return jax.tree.map(lambda x: x + 1, tree)


class Engine:
  def __init__(self):
    self.loads = []

  async def load(self, version, tree):
    await asyncio.sleep(0)
    self.loads.append((version, tree))


async def test_a_version_survives_the_donation_of_its_source(device_thread):
  store = InProcessWeightStore(device_thread=device_thread)
  source = params()
  await store.publish(0, source)
  train(source)
  assert source['b'].is_deleted()
  version, copy = await store.fetch()
  assert version == store.version == 0
  jax.tree.map(np.testing.assert_array_equal, copy, params())


async def test_engines_hear_of_a_version_before_publish_returns(device_thread):
  engines = Engine(), Engine()
  store = InProcessWeightStore(*engines, device_thread=device_thread)
  for version in (0, 3):
    await store.publish(version, params(version))
  for engine in engines:
    assert [version for version, _ in engine.loads] == [0, 3]
    np.testing.assert_array_equal(engine.loads[1][1]['b'], np.arange(5.0) * 3)


async def test_fetch_waits_for_news_and_skips_to_the_newest(device_thread):
  store = InProcessWeightStore(device_thread=device_thread)
  early = asyncio.create_task(store.fetch())
  await asyncio.sleep(0.01)
  assert not early.done() and store.version is None
  await store.publish(0, params())
  assert (await early)[0] == 0
  late = asyncio.create_task(store.fetch(newer_than=1))
  await store.publish(1, params())
  await asyncio.sleep(0.01)
  assert not late.done()
  await store.publish(5, params())
  assert (await late)[0] == 5
  assert (await store.fetch(newer_than=1))[0] == 5


@pytest.mark.parametrize('version', [4, 3])
async def test_versions_must_rise(device_thread, version):
  store = InProcessWeightStore(device_thread=device_thread)
  await store.publish(4, params())
  with pytest.raises(ValueError, match=f'version {version} .* after version 4'):
    await store.publish(version, params())


async def test_floating_point_is_cast_and_the_rest_kept(device_thread):
  store = InProcessWeightStore(
    device_thread=device_thread, options=InProcessOptions(dtype='bfloat16')
  )
  await store.publish(0, params())
  _, copy = await store.fetch()
  assert copy['b'].dtype == jnp.bfloat16 and copy['n'].dtype == jnp.int32


async def test_a_sharded_source_lands_where_it_should(device_thread):
  mesh = jax.make_mesh(
    (4, 2), ('fsdp', 'tensor'), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  spread = NamedSharding(mesh, PartitionSpec('fsdp', 'tensor'))
  source = {'kernel': jax.device_put(jnp.arange(32.0).reshape(8, 4), spread)}
  home = SingleDeviceSharding(jax.devices()[0])
  store = InProcessWeightStore(device_thread=device_thread, sharding=home)
  await store.publish(0, source)
  _, copy = await store.fetch()
  assert copy['kernel'].sharding.device_set == {jax.devices()[0]}
  np.testing.assert_array_equal(copy['kernel'], np.arange(32.0).reshape(8, 4))
  kept = InProcessWeightStore(device_thread=device_thread)
  await kept.publish(0, source)
  assert (await kept.fetch())[1]['kernel'].sharding == spread


async def test_an_engine_that_copies_gets_the_parameters_themselves(device_thread):
  class Copying(Engine):
    copies_weights = True

    async def load(self, version, tree, *, copy=False):
      assert copy
      await super().load(version, tree)

  source, engine = params(), Copying()
  await InProcessWeightStore(engine, device_thread=device_thread).publish(0, source)
  assert engine.loads[0][1]['b'] is source['b']
  # Not where the store changes them, or another engine needs a copy.
  for engines, options in (
    ([Engine(), Engine()], {}),
    ([Engine()], {'options': InProcessOptions(dtype='bfloat16')}),
  ):
    engines[0].copies_weights = True
    store = InProcessWeightStore(*engines, device_thread=device_thread, **options)
    await store.publish(0, source)
    assert all(one.loads[0][1]['b'] is not source['b'] for one in engines)
