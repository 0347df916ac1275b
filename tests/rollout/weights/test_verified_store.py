"""Engines that load when told to, and are asked what they hold."""

import asyncio
import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.device_thread import DeviceThread
from jaxrl.rollout.engine.actor_proxy import EngineDeadError
from jaxrl.rollout.weights.publisher import VersionWriter, WeightPublisher
from jaxrl.rollout.weights.shards import Region, Shard, as_uint_view, flatten
from jaxrl.rollout.weights.snapshots import snapshot
from jaxrl.rollout.weights.subscriber import VersionReader, place_on_device
from jaxrl.rollout.weights.transport import (
  FolderTransport,
  SharedMemoryTransport,
  WeightsError,
)
from jaxrl.rollout.weights.verified_store import (
  EngineWeightClient,
  LoadCoordinator,
  VerifiedWeightStore,
)
from tests.rollout.weights.helpers import (
  SMALL,
  MemoryTransport,
  Rough,
  halves,
  make,
  same,
  small_blobs,
  step,
)


class Engine:
  """Keeps what it is given; `bend` may spoil it on its way to the device."""

  def __init__(self, transport):
    self.loads, self.bend = [], lambda params: params
    place = lambda params: self.bend(place_on_device(params))  # noqa: E731
    self._puller = EngineWeightClient(transport, self._load, place=place)
    self.requests = []

  async def _load(self, version, params):
    self.loads.append((version, params))

  async def pull(self, version, *, full=False):
    self.requests.append((version, full))
    return await self._puller.pull(version, full=full)


class Gone(Engine):
  async def pull(self, version, *, full=False):
    raise EngineDeadError('it is no more')


@pytest.fixture
def device_thread():
  device_thread = DeviceThread()
  yield device_thread
  device_thread.close()


def learner(channel, engines, device_thread, **options):
  broadcast = WeightPublisher(
    channel, device_thread=device_thread, **small_blobs(**options)
  )
  return VerifiedWeightStore(broadcast, LoadCoordinator(engines))


def small(seed=0):
  return {k: v for k, v in make(seed, 500).items() if k != 'count'}


async def test_every_engine_has_a_version_when_it_is_published(device_thread):
  channel, params = MemoryTransport(), small()
  engines = [Engine(channel), Engine(channel)]
  store = learner(channel, engines, device_thread)
  assert store.version is None and store.metrics() == {}
  for version in (0, 3):
    await store.publish(version, params)
    for engine in engines:
      assert engine.loads[-1][0] == version and same(engine.loads[-1][1], params)
    kept, params = params, step(params, 0.01, version)
  metrics = store.metrics()
  assert 0 < metrics['weights/share'] < 0.2 and 0 < metrics['weights/changed'] < 0.02
  assert metrics['weights/bytes'] == metrics['weights/share'] * 4 * (1500 + 7)
  assert metrics['weights/pull_s'] > 0 and store.version == 3
  assert (await store.fetch())[0] == 3
  engines.append(Engine(channel))
  await store.catch_up(engines[-1], 'engine 2')
  assert engines[-1].loads[-1][0] == 3 and same(engines[-1].loads[-1][1], kept)
  await store.close()


async def test_an_engine_that_is_gone_does_not_fail_the_others(device_thread, caplog):
  channel, params = MemoryTransport(), small()
  engines = [Gone(channel), Engine(channel)]
  store = learner(channel, engines, device_thread)
  await store.publish(0, params)
  assert engines[1].loads[0][0] == 0
  assert 'engine 1 of 2 did not get weights version 0' in caplog.text
  engines[0] = Engine(channel)  # somebody replaced it
  await store.publish(1, params)
  assert engines[0].loads[-1][0] == 1
  await store.close()


async def test_what_lives_and_fails_is_an_error(device_thread):
  channel = MemoryTransport()
  engine = Engine(channel)
  engine._puller._load = None
  store = learner(channel, [engine], device_thread)
  with pytest.raises(TypeError):
    await store.publish(0, small())
  await store.close()


def bent(params):
  return {**params, 'norm': params['norm'].at[0].add(1)}


async def test_weights_spoilt_on_their_way_are_loaded_again_in_full(device_thread):
  channel, params = MemoryTransport(), small()
  engine = Engine(channel)
  store = learner(channel, [engine], device_thread)
  await store.publish(0, params)

  def once(tree):
    engine.bend = lambda params: params
    return bent(tree)

  engine.bend = once
  params = step(params)
  await store.publish(1, params)
  assert engine.requests == [(0, False), (1, False), (1, True)]
  assert [version for version, _ in engine.loads] == [0, 1]  # the spoilt one never
  assert same(engine.loads[-1][1], params)
  await store.close()


async def test_an_engine_whose_weights_stay_wrong_is_named(device_thread):
  channel = MemoryTransport()
  engines = [Engine(channel), Engine(channel)]
  store = learner(channel, engines, device_thread)
  engines[1].bend = bent
  pattern = (
    r'engine 2 of 2 holds other weights .* version 7 twice: digest (\w+), where (\w+)'
  )
  with pytest.raises(WeightsError, match=pattern) as caught:
    await store.publish(7, small())
  held, published = re.search(pattern, str(caught.value)).groups()
  assert held != published == store._publisher.digest
  assert not engines[1].loads
  await store.close()


async def test_parts_of_two_processes_are_compared_all(device_thread):
  """The second process publishes late; its digest is waited for, and compared too."""
  channel = Rough()
  whole = np.arange(64, dtype=np.float32).reshape(8, 8)

  def half(part, values):
    region = Region('w', 'float32', (8, 8), (4 * part, 0), (4, 8))
    return [Shard(region, as_uint_view(values[4 * part : 4 * part + 4].copy()))]

  other = VersionWriter(channel, part=1, **SMALL)
  store = WeightPublisher(channel, device_thread=device_thread, parts=2, **SMALL)
  store._writer.publish(0, half(0, whole))
  waiting = asyncio.create_task(store.combined_digest())
  await asyncio.sleep(0.05)
  assert not waiting.done()
  other.publish(0, half(1, whole))
  assert await waiting == f'{store.digest}-{other.digest}'
  receiver = VersionReader(channel, parts=2)
  assert receiver.poll() == 0 and '-'.join(receiver.digests) == await waiting
  assert receiver.digests_of(receiver.params()) == receiver.digests
  spoilt = {'w': receiver.params()['w'].copy()}
  spoilt['w'][7, 7] += 1
  first, second = receiver.digests_of(spoilt)
  assert first == store.digest and second != other.digest
  await store.close()


async def test_a_cast_is_what_engines_hold(device_thread):
  channel, params = MemoryTransport(), small()
  engine = Engine(channel)
  store = learner(channel, [engine], device_thread, dtype='bfloat16')
  await store.publish(0, params)
  assert engine.loads[0][1]['norm'].dtype == jnp.bfloat16
  assert same(engine.loads[0][1], halves(params))
  await store.close()


def test_the_digests_of_windows():
  channel, params = MemoryTransport(), small()
  publisher = VersionWriter(channel, **SMALL)
  publisher.publish(0, snapshot(params))
  window = {'layers.kernel': (slice(0, 1), slice(0, 500))}
  receiver = VersionReader(channel, windows=window)
  receiver.poll()
  held = receiver.params()
  assert receiver.digests_of(held) == receiver.digests == (publisher.digest,)
  bad = {**held, 'norm': held['norm'] + 1}
  assert receiver.digests_of(bad) != receiver.digests


async def test_full_versions_are_copied_once_and_differences_twice(
  device_thread, monkeypatch
):
  channel, params = SharedMemoryTransport(), small()
  engine = Engine(channel)
  store = learner(channel, [engine], device_thread)
  size = sum(array.nbytes for array in flatten(params).values())
  copied, copy = [], np.copyto

  def counted(out, source, **options):
    copied.append(out.nbytes)
    copy(out, source, **options)

  monkeypatch.setattr(np, 'copyto', counted)
  for version in range(3):
    copied.clear()
    await store.publish(version, params)
    assert sum(copied) == (size if version else 0)  # into buffers; then once from there
    held = flatten(engine._puller._subscriber.reader.params())
    arrays = flatten(engine.loads[-1][1])
    assert same(engine.loads[-1][1], params)
    assert not any(np.shares_memory(held[n], np.asarray(arrays[n])) for n in held)
    params = step(params, seed=version)
  loaded = engine._puller._subscriber.reader.load_report
  assert not loaded.full and loaded.received_bytes < size  # by what changed
  await store.close()
  channel.close()


async def test_a_version_that_is_nowhere_to_be_found_is_an_error():
  puller = EngineWeightClient(MemoryTransport(), None, patience=0.05)
  with pytest.raises(WeightsError, match='no version after 3 was found'):
    await asyncio.wait_for(puller.pull(4), 10)


async def test_a_folder_that_is_not_shared_is_named(tmp_path):
  with pytest.raises(WeightsError, match=r'nowhere: \S+ has no such folder'):
    FolderTransport(tmp_path / 'nowhere', make=False)
  assert not (tmp_path / 'nowhere').exists()
  transport = FolderTransport(tmp_path / 'here')
  transport.put('a', b'1')
  assert bytes(FolderTransport(transport.path, make=False).get('a')) == b'1'


async def test_one_that_is_gone_is_told_of_once(device_thread, caplog):
  channel, params = MemoryTransport(), small()
  store = learner(channel, [Engine(channel), Gone(channel)], device_thread)
  for version in range(3):
    await store.publish(version, params)
  assert caplog.text.count('engine 2 of 2 did not get weights') == 1
