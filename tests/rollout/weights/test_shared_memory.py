"""Shared memory: full bytes are checked where they lie; engines alone copy them."""

import asyncio
import gc
import mmap
import os
import tracemalloc
import types

import jax
import numpy as np
import pytest
import safetensors

from jaxrl.rollout.weights.publisher import VersionWriter, VersionWriterOptions
from jaxrl.rollout.weights.shards import flatten
from jaxrl.rollout.weights.snapshots import snapshot
from jaxrl.rollout.weights.subscriber import VersionReader, place_on_device
from jaxrl.rollout.weights.transport import (
  FolderTransport,
  SharedMemoryTransport,
  WeightsError,
  join_folder,
)
from jaxrl.rollout.weights.verified_store import EngineWeightClient
from tests.rollout.weights.helpers import SMALL, halves, make, same, small_blobs, step


@pytest.fixture
def shared():
  shared = SharedMemoryTransport()
  yield shared
  shared.close()


def mapped(array):
  """Whether an array is a view of a mapped file."""
  while isinstance(array, np.ndarray):
    array = array.base
  return isinstance(array, memoryview) and isinstance(array.obj, mmap.mmap)


def views(receiver):
  return {name for name, x in flatten(receiver.params()).items() if mapped(x)}


def blobs(transport, version):
  names = (n for n in transport.names('0-run-') if n.endswith('.safetensors'))
  return sorted(n for n in names if n.split('-')[3] == str(version))


def spoil(transport, name):
  """Other last bytes, in a file of the same name."""
  transport.put(name, bytes(transport.get(name))[:-9] + b'spoilt it')


def test_the_engines_copy_of_a_full_version_is_the_only_one(shared):
  rows = np.random.default_rng(0).standard_normal((8, 1 << 18)).astype(np.float32)
  params = {'large': rows, 'small': np.ones(1000, np.float32)}
  size = rows.nbytes + 4000
  options = VersionWriterOptions(chunk_bytes=1 << 18, blob_bytes=1 << 20)
  publisher = VersionWriter(shared, options=options)
  publisher.publish(0, snapshot(params))
  loaded = []

  async def load(version, params):
    loaded.append(params)

  puller = EngineWeightClient(join_folder(shared.address), load)
  place_on_device({'x': np.ones(3, np.float32)})  # what is made once is not counted
  gc.collect()  # what other tests left
  before = sum(x.nbytes for x in jax.live_arrays())
  tracemalloc.start()
  assert asyncio.run(puller.pull(0)) == publisher.digest
  _, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert sum(x.nbytes for x in jax.live_arrays()) - before == size  # XLA's, once
  assert peak < size / 8  # Python's and numpy's: none of that size
  receiver = puller._subscriber.reader
  assert views(receiver) == {'large', 'small'}
  assert receiver.load_report.received_bytes > size and same(loaded[0], params)
  puller.close(), publisher.close()


@pytest.mark.parametrize('offset', [0, 8, 64])
def test_what_engines_get_does_not_alias_the_mapping(offset, tmp_path):
  file = tmp_path / 'bytes'
  file.write_bytes(bytes(offset) + np.arange(4096, dtype=np.float32).tobytes())
  with open(file, 'rb') as opened:
    memory = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
  view = np.frombuffer(memory, np.float32, offset=offset)
  start = view.ctypes.data
  assert start % mmap.PAGESIZE == offset  # at 0 and 64, where JAX could use it as it is
  placed = place_on_device({'w': view})['w']
  assert not np.shares_memory(np.asarray(placed), view)
  at = placed.unsafe_buffer_pointer()
  assert at + placed.nbytes <= start or at >= start + view.nbytes
  with open(file, 'r+b') as opened:
    opened.seek(offset)
    opened.write(bytes(view.nbytes))
  assert not view.any() and np.asarray(placed)[-1] == 4095


def test_parameters_of_any_size_and_dtype_lie_in_one_run(shared):
  params = {'a': np.arange(7, dtype=np.int8), **halves(make()), 'z': np.ones((5, 500))}
  publisher, receiver = VersionWriter(shared, **SMALL), VersionReader(shared)
  publisher.publish(0, snapshot(params))
  assert receiver.poll() == 0 and same(receiver.params(), params)
  assert views(receiver) == set(flatten(params)) and 'z' in views(receiver)
  assert all(x.flags.aligned for x in flatten(receiver.params()).values())
  assert params['z'].nbytes > SMALL['options'].blob_bytes and len(blobs(shared, 0)) > 1
  for name in blobs(shared, 0):
    assert safetensors.deserialize(bytes(shared.get(name)))


def test_a_chunk_that_changed_everywhere_does_not_tear_the_full_bytes(shared):
  params = make()
  publisher = VersionWriter(shared, **small_blobs(full_every=2))
  for version in range(2):
    publisher.publish(version, snapshot(params))
  early = VersionReader(shared)
  early.poll()
  params = step(params, 0.001)
  kernel = params['layers']['kernel']
  kernel[1] = step(kernel[1], 1)
  publisher.publish(2, snapshot(params))  # in full, and as a difference
  late = VersionReader(shared)
  for receiver in (early, late):
    assert receiver.poll() == 2 and same(receiver.params(), params)
    assert receiver.digests == (publisher.digest,)
  assert views(late) == set(flatten(params)) and 'layers.kernel' not in views(early)


def test_too_little_memory_is_said_before_anything_is_written(shared, monkeypatch):
  params = make()
  size = sum(x.nbytes for x in flatten(params).values())
  room = types.SimpleNamespace(f_bavail=3 * size - 1, f_frsize=1)
  monkeypatch.setattr(os, 'statvfs', lambda _: room)
  publisher = VersionWriter(shared, **small_blobs(keep=2, full_every=1))
  with pytest.raises(WeightsError, match=r'use .*=object_store'):
    publisher.publish(0, snapshot(params))
  assert not list(shared.names(''))
  room.f_bavail += 1
  assert publisher.publish(0, snapshot(params)).full_bytes == size


def test_without_differences_all_is_loaded_as_it_lies(shared):
  publisher, receiver = (
    VersionWriter(shared, **small_blobs(full_every=1)),
    VersionReader(shared),
  )
  params, everything = make(), sum(x.size for x in flatten(make()).values())
  for version in range(3):
    report = publisher.publish(version, snapshot(params))
    assert report.delta_bytes is None and report.written_bytes > report.full_bytes
    assert 0 < report.num_changed < everything or version == 0
    assert receiver.poll() == version and same(receiver.params(), params)
    assert receiver.load_report.full and views(receiver) == set(flatten(params))
    params = step(params, 0.01, version)


def test_a_difference_of_everything_is_not_copied_either(shared):
  publisher, receiver = VersionWriter(shared, **SMALL), VersionReader(shared)
  for version in range(4):
    params = step(make(), 1, version)  # random bits, of which no difference is shorter
    publisher.publish(version, snapshot(params))
    assert receiver.poll() == version and same(receiver.params(), params)
    assert 'layers.kernel' in views(receiver)
    assert receiver.load_report.full == (version == 0)


def test_a_spoilt_chunk_leaves_the_version_before(shared):
  publisher, receiver = VersionWriter(shared, **SMALL), VersionReader(shared)
  before, params = make(), step(make(), 1)
  publisher.publish(0, snapshot(before))
  receiver.poll()
  publisher.publish(1, snapshot(params))
  spoil(shared, next(n for n in blobs(shared, 1) if len(shared.get(n)) > 30_000))
  assert receiver.poll() is None and 'lost' in str(receiver.problem)
  assert receiver.version == 0 and same(receiver.params(), before)
  assert 'layers.kernel' in views(receiver)
  publisher.repair()
  assert receiver.poll() == 1 and same(receiver.params(), params)
  assert receiver.digests == (publisher.digest,)
  assert 'layers.kernel' not in views(receiver)  # put together from what came anew


def test_what_is_mapped_outlasts_its_files(shared):
  publisher, receiver = (
    VersionWriter(shared, **small_blobs(keep=1)),
    VersionReader(shared),
  )
  params = make()
  publisher.publish(0, snapshot(params))
  receiver.poll()
  first, kept = receiver.params(), params
  held = [(name, shared.get(name)) for name in blobs(shared, 0)]
  copies = [bytes(data) for _, data in held]
  for name, _ in held:
    shared.put(name, b'other')  # as a file of its own: what is mapped does not change
    shared.delete(name)
  assert copies == [bytes(data) for _, data in held] and not blobs(shared, 0)
  params = step(params)
  publisher.publish(1, snapshot(params))
  assert (
    receiver.poll() == 1 and not receiver.load_report.full
  )  # from the mapping alone
  assert same(receiver.params(), params) and same(first, kept)
  with pytest.raises(ValueError):
    first['norm'][0] = 3
  receiver.close(), shared.close()
  assert not shared.path.exists() and same(first, kept)


def test_versions_come_and_go_while_a_receiver_maps_one(shared):
  publisher = VersionWriter(shared, **small_blobs(keep=1, full_every=1))
  publisher.publish(0, snapshot(make()))
  receiver = VersionReader(shared)
  receiver.poll()
  for version in range(1, 4):
    publisher.publish(version, snapshot(make(version)))
  assert not blobs(shared, 0) and not blobs(shared, 1)
  assert same(receiver.params(), make()) and views(receiver) == set(flatten(make()))
  assert receiver.digests_of(receiver.params()) == receiver.digests
  assert receiver.poll() == 3 and same(receiver.params(), make(3))


def test_files_of_a_folder_are_not_held(tmp_path, shared):
  publisher = VersionWriter(FolderTransport(tmp_path), **SMALL)
  publisher.publish(0, snapshot(make()))
  receiver = VersionReader(join_folder(str(tmp_path)))
  assert (
    receiver.poll() == 0 and same(receiver.params(), make()) and not views(receiver)
  )
  assert isinstance(join_folder(shared.address), SharedMemoryTransport)
