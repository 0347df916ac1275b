import asyncio
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxrl.dispatch import Dispatcher
from jaxrl.rollout.weight_store import InProcessWeights


@pytest.fixture
def dispatcher():
  dispatcher = Dispatcher()
  yield dispatcher
  dispatcher.close()


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


async def test_a_version_survives_the_donation_of_its_source(dispatcher):
  store = InProcessWeights(dispatcher=dispatcher)
  source = params()
  await store.publish(0, source)
  train(source)
  assert source['b'].is_deleted()
  version, copy = await store.fetch()
  assert version == store.version == 0
  jax.tree.map(np.testing.assert_array_equal, copy, params())


async def test_engines_hear_of_a_version_before_publish_returns(dispatcher):
  engines = Engine(), Engine()
  store = InProcessWeights(*engines, dispatcher=dispatcher)
  for version in (0, 3):
    await store.publish(version, params(version))
  for engine in engines:
    assert [version for version, _ in engine.loads] == [0, 3]
    np.testing.assert_array_equal(engine.loads[1][1]['b'], np.arange(5.0) * 3)


async def test_fetch_waits_for_news_and_skips_to_the_newest(dispatcher):
  store = InProcessWeights(dispatcher=dispatcher)
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
async def test_versions_must_rise(dispatcher, version):
  store = InProcessWeights(dispatcher=dispatcher)
  await store.publish(4, params())
  with pytest.raises(ValueError, match=f'version {version} .* after version 4'):
    await store.publish(version, params())


async def test_floating_point_is_cast_and_the_rest_kept(dispatcher):
  store = InProcessWeights(dispatcher=dispatcher, dtype='bfloat16')
  await store.publish(0, params())
  _, copy = await store.fetch()
  assert copy['b'].dtype == jnp.bfloat16 and copy['n'].dtype == jnp.int32


async def test_a_sharded_source_lands_where_it_should(dispatcher):
  mesh = jax.make_mesh(
    (4, 2), ('fsdp', 'tensor'), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  spread = NamedSharding(mesh, PartitionSpec('fsdp', 'tensor'))
  source = {'kernel': jax.device_put(jnp.arange(32.0).reshape(8, 4), spread)}
  home = SingleDeviceSharding(jax.devices()[0])
  store = InProcessWeights(dispatcher=dispatcher, sharding=home)
  await store.publish(0, source)
  _, copy = await store.fetch()
  assert copy['kernel'].sharding.device_set == {jax.devices()[0]}
  np.testing.assert_array_equal(copy['kernel'], np.arange(32.0).reshape(8, 4))
  kept = InProcessWeights(dispatcher=dispatcher)
  await kept.publish(0, source)
  assert (await kept.fetch())[1]['kernel'].sharding == spread
