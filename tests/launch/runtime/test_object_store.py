"""Weights through Ray's object store, to engines in actors that come, go and die."""

import asyncio
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
import zlib

import numpy as np
import pytest

from jaxrl.device_thread import DeviceThread
from jaxrl.rollout.weights.publisher import (
  PublisherOptions,
  VersionWriter,
  VersionWriterOptions,
  WeightPublisher,
)
from jaxrl.rollout.weights.snapshots import snapshot
from jaxrl.rollout.weights.subscriber import VersionReader
from jaxrl.rollout.weights.verified_store import (
  EngineWeightClient,
  LoadCoordinator,
  VerifiedWeightStore,
)
from launch.runtime.engine_pool import EngineHandle
from launch.runtime.object_store import FAN_OUT, ObjectDirectory, ObjectStoreTransport
from tests.rollout.weights.helpers import make, same, step

pytestmark = pytest.mark.xdist_group('ray')
with_ray = pytest.mark.ray


class Engine:
  """Holds the weights it is told to load, and can be told to hang there."""

  def __init__(self, channel):
    self._puller = EngineWeightClient(channel, self._load, place=None)
    self._version, self._sum, self._hang = None, None, False

  async def _load(self, version, params):
    while self._hang:
      self._hang = 'hanging'
      await asyncio.sleep(0.01)
    self._version, self._sum = version, zlib.crc32(params['layers']['kernel'])

  async def pull(self, version, *, full=False):
    return await self._puller.pull(version, full=full)

  async def held(self):
    return self._version, self._sum

  async def hang(self):
    self._hang = True

  async def hangs(self):
    return self._hang == 'hanging'


@pytest.fixture
def channel(ray):
  from jaxrl.rollout.engine.actor_proxy import ActorProxy

  actor = ray.remote(ObjectDirectory).options(num_cpus=0, max_concurrency=1000).remote()
  yield ObjectStoreTransport(ActorProxy(actor))
  ray.kill(actor)


@pytest.fixture
def engines(ray, channel):
  actors = []

  def start():
    options = {'num_cpus': 0, 'max_concurrency': 100}
    actors.append(ray.remote(Engine).options(**options).remote(channel))
    return actors[-1]

  yield start
  for actor in actors:
    ray.kill(actor)


@with_ray
def test_bytes_by_name(channel):
  small, large = b'small', np.random.default_rng(0).bytes(1 << 20)
  for data in (small, large):
    channel.put('a', data)
    view = channel.get('a')
    assert bytes(view) == data and view.readonly
    channel.put('b-1', data[::-1])
    assert sorted(channel.names('')) == ['a', 'b-1'] and channel.names('b') == ['b-1']
    channel.put('a', b'other')
    channel.delete('b-1'), channel.delete('b-1')
    assert bytes(view) == data and bytes(channel.get('a')) == b'other'
    with pytest.raises(KeyError):
      channel.get('b-1')


@with_ray
def test_versions_that_are_over_are_freed(ray, channel):
  """Of 50 versions of 1.5 MB, each in full, what stays is what two or three take."""
  core = ray._private.worker.global_worker.core_worker
  publisher, receiver = (
    VersionWriter(channel, options=VersionWriterOptions(full_every=1), threads=2),
    VersionReader(channel),
  )
  draw, held = np.random.default_rng(0), []
  before = len(core.get_all_reference_counts())
  for version in range(50):
    params = {'w': draw.standard_normal((3, 1 << 17)).astype(np.float32)}
    publisher.publish(version, snapshot(params))
    assert receiver.poll() == version
    held.append(len(core.get_all_reference_counts()))
  assert same(receiver.params(), params)
  assert max(held[10:]) <= max(held[:10]) + 1
  assert len(channel.names('0-run-')) <= 3 * 3  # a manifest and two blobs at most
  receiver.close(), publisher.close()
  for name in channel.names(''):
    channel.delete(name)
  until = time.monotonic() + 20
  while len(core.get_all_reference_counts()) > before:
    assert time.monotonic() < until, (before, held, core.get_all_reference_counts())
    time.sleep(0.05)


@with_ray
@pytest.mark.slow
async def test_engines_that_come_later_or_die(ray, channel, engines, caplog):
  device_thread = DeviceThread()
  first, second = engines(), engines()
  handles = [EngineHandle(first), EngineHandle(second)]
  broadcast = WeightPublisher(
    channel,
    device_thread=device_thread,
    options=PublisherOptions(chunk_bytes=1 << 20),
  )
  store = VerifiedWeightStore(broadcast, LoadCoordinator(handles))
  params = {k: v for k, v in make(0, 100_000).items() if k != 'count'}

  def wanted(version):
    return version, zlib.crc32(params['layers']['kernel'])

  await store.publish(0, params)
  assert await first.held.remote() == await second.held.remote() == wanted(0)

  # One is killed as it loads; whoever publishes does not fail, nor wait for it.
  await second.hang.remote()
  params = step(params)
  publishing = asyncio.create_task(store.publish(1, params))
  while not await second.hangs.remote():
    await asyncio.sleep(0.01)
  ray.kill(second)
  await asyncio.wait_for(publishing, 20)
  assert await first.held.remote() == wanted(1)
  assert 'engine 2 of 2 did not get weights version 1' in caplog.text

  # Another in its place gets what it missed, and then every version.
  third = engines()
  handles[1].rebind(third)
  await store.catch_up(handles[1], 'engine 1')
  assert await third.held.remote() == wanted(1)
  params = step(params, seed=1)
  await store.publish(2, params)
  assert await first.held.remote() == await third.held.remote() == wanted(2)

  # What is spoilt in the store is sent again, and never loaded.
  for name in channel.names('0-run-'):
    if name.endswith('.safetensors'):
      channel.put(name, bytes(channel.get(name))[:-1] + b'?')
  late = engines()
  await asyncio.wait_for(store.catch_up(EngineHandle(late), 'engine 2'), 20)
  assert await late.held.remote() == wanted(2)
  await store.close()
  device_thread.close()


async def test_no_more_nodes_fetch_at_once_than_there_are_to_fetch_from():
  directory = ObjectDirectory()
  await directory.put('blob', ['a reference'], 'source')
  await directory.put('word', b'bytes', 'source')
  nodes = [str(number) for number in range(2 * FAN_OUT + 2)]
  requests = {n: asyncio.create_task(directory.get('blob', n)) for n in nodes}

  async def served():
    for _ in range(10):
      await asyncio.sleep(0)
    return [n for n, task in requests.items() if task.done()]

  assert await served() == nodes[:FAN_OUT]
  assert await directory.get('blob', nodes[0])  # for another reader there
  assert await directory.get('blob', 'source') == ['a reference']
  assert await directory.get('word', nodes[-1]) == b'bytes'
  await directory.fetched('blob', nodes[0])  # two have it now, and one is fetching
  assert await served() == nodes[: 2 * FAN_OUT + 1]
  assert not requests[nodes[-1]].done()
  await directory.delete('blob')
  await directory.fetched('blob', nodes[1])
  assert await directory.get('blob', 'source') is None
  requests[nodes[-1]].cancel()


@with_ray
@pytest.mark.slow
@pytest.mark.extended
def test_nodes_have_a_version_from_one_another():
  """Of what two nodes read, each of half, a good part does not come from the learner's:
  three quarters would, if whoever comes second had it from either by chance.
  """
  if shutil.which('ss') is None:
    pytest.skip('there is no ss here')
  command = [sys.executable, '-m', 'tests.launch.runtime.share_a_version']
  env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''}
  root = pathlib.Path(__file__).parents[3]
  result = subprocess.run(
    command, capture_output=True, text=True, timeout=300, cwd=root, env=env
  )
  assert result.returncode == 0, result.stderr
  figures = json.loads(result.stdout.splitlines()[-1])
  assert figures['read'] > 2 * 4 * 48 << 20
  assert 0.45 < figures['sent'] / figures['read'] < 0.9, figures
