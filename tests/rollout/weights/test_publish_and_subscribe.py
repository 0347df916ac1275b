import asyncio
import contextlib
import os
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.device_thread import DeviceThread
from jaxrl.rollout.weights.publisher import PublisherOptions, WeightPublisher
from jaxrl.rollout.weights.subscriber import VersionReader, WeightSubscriber
from jaxrl.rollout.weights.transport import FolderTransport, WeightsError
from tests.rollout.weights.helpers import MemoryTransport, Rough


@pytest.fixture
def device_thread():
  device_thread = DeviceThread()
  yield device_thread
  device_thread.close()


def params(value=1.0):
  return {'a': {'kernel': jnp.full((8, 4), value)}, 'n': jnp.arange(3)}


async def follow(engine, weights):
  """Has `engine` serve every new version, until cancelled."""
  version = -1
  while True:
    version, params = await weights.fetch(version)
    await engine.load(version, params)


class Engine:
  def __init__(self):
    self.loads = []

  async def load(self, version, tree):
    self.loads.append((version, float(tree['a']['kernel'][0, 0])))


async def test_engines_follow_and_fetch_waits_for_news(device_thread):
  channel, engine = MemoryTransport(), Engine()
  store = WeightPublisher(
    channel, device_thread=device_thread, options=PublisherOptions(dtype='bfloat16')
  )
  ends = WeightSubscriber(channel), WeightSubscriber(channel, place=None)
  following = asyncio.create_task(follow(engine, ends[0]))
  waiting = asyncio.create_task(ends[1].fetch())
  await asyncio.sleep(0.05)
  assert not waiting.done() and store.version is None
  for version in (0, 3):
    await store.publish(version, params(float(version)))
    await asyncio.sleep(0.1)
  version, tree = await waiting
  assert version == 0 and isinstance(tree['a']['kernel'], np.ndarray)
  assert (await ends[1].fetch(0))[0] == (await store.fetch())[0] == 3
  assert engine.loads == [(0, 0.0), (3, 3.0)]
  assert store.digest == ends[0].reader.digests[0] == store.report.digest
  tree = (await ends[0].fetch())[1]
  assert tree['a']['kernel'].dtype == jnp.bfloat16 and tree['n'].dtype == jnp.int32
  following.cancel()
  with contextlib.suppress(asyncio.CancelledError):
    await following
  await store.close()
  for end in ends:
    end.close()


async def test_what_is_lost_comes_again_by_itself(device_thread):
  channel = Rough()
  store = WeightPublisher(channel, device_thread=device_thread)
  await store.publish(0, params(2.0))
  for name in channel.names('0-run-'):
    channel.delete(name) if name.endswith('.safetensors') else None
  end = WeightSubscriber(channel)
  version, tree = await asyncio.wait_for(end.fetch(), 10)
  assert version == 0 and (np.asarray(tree['a']['kernel']) == 2.0).all()
  await store.close()


async def test_what_stays_lost_is_an_error(device_thread):
  channel = Rough()
  store = WeightPublisher(channel, device_thread=device_thread)
  await store.publish(0, params())
  channel.spoil = lambda name, data: None if '.safetensors' in name else data
  with pytest.raises(WeightsError, match=r'stayed incomplete for 0\.2 s: version 0'):
    await WeightSubscriber(channel, patience=0.2).fetch()
  await store.close()


async def test_a_learner_that_starts_again_is_followed(device_thread):
  channel, end = MemoryTransport(), WeightSubscriber(MemoryTransport())
  end = WeightSubscriber(channel)
  for version, value in ((57, 1.0), (40, 2.0)):
    store = WeightPublisher(channel, device_thread=device_thread)
    await store.publish(version, params(value))
    newer_than = -1 if version == 57 else 57
    fetched, tree = await asyncio.wait_for(end.fetch(newer_than), 10)
    assert fetched == version and float(tree['a']['kernel'][0, 0]) == value
    await store.close()


# One process of a learner: argv holds its number and the port and folder to meet at.
LEARNER = """
import sys
import jax
import numpy as np
number, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(f'127.0.0.1:{port}', 2, number)
from jax.sharding import NamedSharding, PartitionSpec
from jaxrl.rollout.weights.snapshots import snapshot
from jaxrl.rollout.weights.publisher import VersionWriter
from jaxrl.rollout.weights.transport import FolderTransport
mesh = jax.make_mesh((8,), ('x',), axis_types=(jax.sharding.AxisType.Auto,))
spread = NamedSharding(mesh, PartitionSpec('x'))
publisher = VersionWriter(FolderTransport(folder), part=number)
for version in range(3):
  whole = np.arange(64 * 32, dtype=np.float32).reshape(64, 32) + version
  made = jax.make_array_from_callback(whole.shape, spread, lambda i: whole[i])
  shards = snapshot({'w': made}, 'bfloat16')
  assert sum(s.bits.size for s in shards) == whole.size // 2  # its own half alone
  publisher.publish(version, shards)
"""


@pytest.mark.slow
def test_a_learner_of_two_processes_gathers_nothing(tmp_path):
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    port = probe.getsockname()[1]
  flags = '--xla_force_host_platform_device_count=4'
  env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': flags}
  command = [sys.executable, '-c', LEARNER]
  root = pathlib.Path(__file__).parents[3]
  both = [
    subprocess.Popen([*command, str(i), str(port), str(tmp_path)], cwd=root, env=env)
    for i in (0, 1)
  ]
  assert [one.wait(120) for one in both] == [0, 0]
  receiver = VersionReader(FolderTransport(tmp_path), parts=2)
  assert receiver.poll() == 2 and len(receiver.digests) == 2
  whole = np.arange(64 * 32, dtype=np.float32).reshape(64, 32) + 2
  wanted = jax.device_get(jnp.asarray(whole).astype('bfloat16'))
  np.testing.assert_array_equal(receiver.params()['w'], wanted)
