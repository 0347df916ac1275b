"""Differences found on the device: to the bit those of whole snapshots."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.device_thread import DeviceThread
from jaxrl.rollout.weights import delta_encoding
from jaxrl.rollout.weights.publisher import VersionWriter, WeightPublisher
from jaxrl.rollout.weights.snapshots import DeviceDeltaSnapshot, snapshot
from jaxrl.rollout.weights.subscriber import VersionReader
from tests.rollout.weights.helpers import (
  SMALL,
  MemoryTransport,
  halves,
  make,
  same,
  small_blobs,
  step,
)


def on_devices(params):
  """The kernels split over two devices, all else on each of them."""
  mesh = jax.make_mesh((2,), ('x',), axis_types=(jax.sharding.AxisType.Auto,))

  def put(x):
    spec = PartitionSpec(None, 'x') if x.ndim == 2 else PartitionSpec()
    return jax.device_put(x, NamedSharding(mesh, spec))

  return jax.tree.map(put, params)


@pytest.mark.parametrize('dtype', [None, 'bfloat16'])
def test_snapshots_are_those_that_copy_all(dtype):
  params, changes = make(), DeviceDeltaSnapshot(dtype)
  delta_names = []
  for version, share in enumerate((0, 0.01, 0, 0.5, 0.03)):
    params = step(params, share, version)
    there = {**on_devices(params), 'host': params['norm']}
    shards, wanted = changes.snapshot(there), snapshot(there, dtype)
    assert [s.region for s in shards] == [s.region for s in wanted]
    for a, b in zip(shards, wanted, strict=True):
      np.testing.assert_array_equal(a.bits, b.bits)
      if a.changed_indices is not None:
        np.testing.assert_array_equal(
          a.changed_indices, delta_encoding.find_changes(a.base_bits, a.bits)
        )
    delta_names.append([s.region.name for s in shards if s.changed_indices is not None])
  both = ['layers.kernel'] * 2
  assert delta_names == [[], both, both, [], both]  # half of the elements are too many


def test_what_was_copied_outlives_its_source():
  @functools.partial(jax.jit, donate_argnums=0)
  def train(x):
    return x.at[0, :9].add(1)

  changes, x = DeviceDeltaSnapshot(), jnp.zeros((64, 128))
  held = []
  for _ in range(4):
    held.append(changes.snapshot({'w': x})[0])
    x = train(x)
    for before, shard in enumerate(held):
      assert shard.bits.view(np.float32).sum() == 9 * before
  assert [s.changed_indices is None for s in held] == [True, False, False, False]


def test_receivers_load_them_and_the_host_compares_nothing(monkeypatch):
  channel, params, changes = MemoryTransport(), make(), DeviceDeltaSnapshot()
  publisher, receiver = VersionWriter(channel, **SMALL), VersionReader(channel)
  compared, look = [], delta_encoding.find_changes

  def compare(old, new):
    compared.append(new.nbytes)
    return look(old, new)

  monkeypatch.setattr(delta_encoding, 'find_changes', compare)
  params['count'] = params['count'].astype(np.int32)  # JAX knows no longer ones
  for version in range(3):
    params = step(params, 0.01, version)
    report = publisher.publish(version, changes.snapshot(on_devices(params)))
    assert receiver.poll() == version and same(receiver.params(), params)
  assert report.num_changed and report.delta_bytes < report.full_bytes / 4
  assert sum(compared) < 200  # of 36 kB: what is too small for a kernel
  # A snapshot that never was published: the next differs from another version.
  changes.snapshot(on_devices(make(1)))
  publisher.publish(3, changes.snapshot(on_devices(params)))
  assert receiver.poll() == 3 and same(receiver.params(), params)
  assert sum(compared) > 36_000
  publisher.close()


async def test_a_store_takes_them_if_it_is_told_to(monkeypatch):
  channel, params, device_thread = MemoryTransport(), make(), DeviceThread()
  options = small_blobs(dtype='bfloat16', on_device=True)
  store = WeightPublisher(channel, device_thread=device_thread, **options)
  receiver = VersionReader(channel)
  params['count'] = params['count'].astype(np.int32)
  await store.publish(0, on_devices(params))
  monkeypatch.setattr(
    delta_encoding, 'find_changes', lambda old, new: np.flatnonzero(old != new)[:9]
  )
  params['layers']['kernel'][1, 100:300] += 1  # more than a compare now tells
  await store.publish(1, on_devices(params))
  assert receiver.poll() == 1 and same(receiver.params(), halves(params))
  assert store.metrics()['weights/changed'] == 200 / 9012
  await store.close()
  device_thread.close()
