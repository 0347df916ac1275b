"""Who gets which version, in how many bytes, and to the bit."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.rollout.weights.publisher import VersionWriter
from jaxrl.rollout.weights.snapshots import snapshot
from jaxrl.rollout.weights.subscriber import VersionReader
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

SHARES = st.sampled_from([0, 0.001, 0.1, 0.9])


# ---- the bits


def test_fifty_versions_later_nothing_differs():
  transport, params = MemoryTransport(), halves(make())
  publisher = VersionWriter(transport, **SMALL)
  eager, lazy = VersionReader(transport), VersionReader(transport)
  shares = []
  for version in range(51):
    report = publisher.publish(version, snapshot(params))
    assert eager.poll() == version and eager.digests == (publisher.digest,)
    assert same(eager.params(), params)
    if version % 7 == 3:
      assert lazy.poll() == version and same(lazy.params(), params)
    assert eager.load_report.full == (version == 0)
    shares.append((report.delta_bytes or 0) / report.full_bytes)
    params = step(params, 0.01, version)
  assert eager.load_report.repeats == lazy.load_report.repeats == 0
  # Random bits are the worst there is; the manifests of so small a model count too.
  assert np.mean(shares[1:]) < 0.12


@pytest.mark.parametrize('master', [True, False])
def test_adamw_at_one_in_a_million_in_bf16(master):
  """master: float32 weights are trained, and cast as they are published."""
  draw = np.random.default_rng(0)
  kernel = draw.normal(0, 0.05, (256, 128)).astype(np.float32)
  params = {'kernel': jnp.asarray(kernel), 'scale': jnp.ones(128)}
  if not master:
    params = jax.tree.map(lambda x: x.astype('bfloat16'), params)
  optimizer = optax.adamw(1e-6)
  state = optimizer.init(params)

  @jax.jit
  def train(params, state, key):
    noise = jax.tree.map(lambda x: jax.random.normal(key, x.shape, x.dtype), params)
    updates, state = optimizer.update(noise, state, params)
    return optax.apply_updates(params, updates), state

  transport = MemoryTransport()
  publisher, receiver = VersionWriter(transport), VersionReader(transport)
  shares = []
  for version in range(51):
    report = publisher.publish(version, snapshot(params, 'bfloat16'))
    receiver.poll()
    wanted = jax.tree.map(lambda x: np.asarray(x.astype('bfloat16')), params)
    assert same(receiver.params(), wanted), version
    shares.append((report.delta_bytes or 0) / report.full_bytes)
    params, state = train(params, state, jax.random.key(version))
  assert receiver.load_report.version == 50 and not receiver.load_report.full
  assert np.mean(shares[1:]) < 0.03
  assert publisher.version == receiver.version == 50


@settings(max_examples=40, deadline=None)
@given(
  st.lists(st.tuples(st.sampled_from([0, 0.001, 0.1, 0.9]), st.booleans()), max_size=9)
)
def test_any_changes_seen_at_any_time(history):
  transport, params = MemoryTransport(), make(size=500)
  publisher, receiver = (
    VersionWriter(transport, **small_blobs(full_every=3)),
    VersionReader(transport),
  )
  for version, (share, look) in enumerate(history):
    publisher.publish(version, snapshot(params))
    if look:
      assert receiver.poll() == version and same(receiver.params(), params)
    params = step(params, share, version)
  fresh = VersionReader(transport)
  if history:
    assert fresh.poll() == len(history) - 1
    assert fresh.digests == (publisher.digest,)
  publisher.close(), receiver.close(), fresh.close()


# ---- who gets what


def test_late_joiners_get_it_whole_and_others_the_difference():
  transport, params = MemoryTransport(), make()
  publisher, early = VersionWriter(transport, **SMALL), VersionReader(transport)
  full = publisher.publish(0, snapshot(params)).full_bytes
  early.poll()
  for version in range(1, 4):
    params = step(params, 0.001, version)
    report = publisher.publish(version, snapshot(params))
  late = VersionReader(transport)
  assert early.poll() == late.poll() == 3
  assert late.load_report.full and late.load_report.received_bytes > full
  assert not early.load_report.full and early.load_report.received_bytes < 0.2 * full
  assert report.delta_bytes < 0.1 * full and report.written_bytes == report.delta_bytes
  assert early.poll() is None


def test_an_unchanged_version_costs_its_manifest():
  transport, params = MemoryTransport(), make()
  publisher, receiver = VersionWriter(transport, **SMALL), VersionReader(transport)
  publisher.publish(0, snapshot(params))
  receiver.poll()
  report = publisher.publish(1, snapshot(params))
  assert report.num_changed == 0 and receiver.poll() == 1
  assert report.delta_bytes == receiver.load_report.received_bytes < 3000


def test_chunks_that_changed_everywhere_go_whole_and_others_do_not():
  transport, params = MemoryTransport(), make()
  publisher, receiver = VersionWriter(transport, **SMALL), VersionReader(transport)
  publisher.publish(0, snapshot(params))
  receiver.poll()
  params['layers']['kernel'] = params['layers']['kernel'].copy()
  params['layers']['kernel'].view('u4')[0] ^= np.random.default_rng(0).integers(
    1, 1 << 32, 3000, np.uint32
  )
  report = publisher.publish(1, snapshot(params))
  assert receiver.poll() == 1 and same(receiver.params(), params)
  assert 12_000 < report.delta_bytes < 20_000  # a third of 36 kB, manifest included


def test_another_layout_starts_anew():
  transport = MemoryTransport()
  publisher, receiver = VersionWriter(transport, **SMALL), VersionReader(transport)
  for version, params in enumerate((make(size=100), make(size=101), halves(make()))):
    assert publisher.publish(version, snapshot(params)).delta_bytes is None
    assert receiver.poll() == version and receiver.load_report.full
    assert same(receiver.params(), params)


def test_a_new_learner_is_followed_from_its_first_version():
  transport, receiver = MemoryTransport(), None
  for versions, seed in (((8, 9), 0), ((4, 5), 1)):
    publisher = VersionWriter(transport, **SMALL)
    receiver = receiver or VersionReader(transport)
    for version in versions:
      params = make(seed)
      publisher.publish(version, snapshot(params))
      assert receiver.poll() == version and same(receiver.params(), params)
  # Nothing of the first is left once the second frees what is its own.
  for version in (6, 7, 8):
    publisher.publish(version, snapshot(make(version)))
  runs = {name.split('-')[2] for name in transport.names('0-run-')}
  assert len(runs) == 1


def test_windows_take_what_they_meet():
  mesh = jax.make_mesh((4,), ('x',), axis_types=(jax.sharding.AxisType.Auto,))
  spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('x'))
  whole = np.arange(64 * 100, dtype=np.float32).reshape(64, 100)
  transport = MemoryTransport()
  publisher = VersionWriter(transport, **SMALL)
  window = (slice(0, 16), slice(0, 100))
  receiver = VersionReader(transport, windows={'w': window})
  for version in range(3):
    shards = snapshot({'w': jax.device_put(whole + version, spread)})
    publisher.publish(version, shards)
    receiver.poll()
    np.testing.assert_array_equal(receiver.params()['w'], (whole + version)[window])
    assert receiver.load_report.received_bytes < 0.4 * whole.nbytes


def test_two_processes_of_a_learner_make_one_version():
  transport, params = MemoryTransport(), make()
  shards = snapshot(params)
  publishers = [VersionWriter(transport, part=part, **SMALL) for part in (0, 1)]
  receiver = VersionReader(transport, parts=2)
  publishers[0].publish(0, shards[:1])
  assert receiver.poll() is None  # half a version is none
  publishers[1].publish(0, shards[1:])
  assert receiver.poll() == 0 and same(receiver.params(), params)
  params = step(params)
  shards = snapshot(params)
  publishers[1].publish(1, shards[1:])
  assert receiver.poll() is None and receiver.version == 0
  publishers[0].publish(1, shards[:1])
  assert receiver.poll() == 1 and same(receiver.params(), params)
  assert receiver.digests == tuple(p.digest for p in publishers)


def test_versions_must_rise():
  publisher = VersionWriter(MemoryTransport())
  publisher.publish(4, snapshot(make()))
  for version in (4, 3):
    with pytest.raises(ValueError, match=f'version {version} was published after ver'):
      publisher.publish(version, snapshot(make()))


# ---- what stays, and who waits


def versions(transport):
  stored = transport.names('0-run-')
  return sorted({int(n.split('-')[3].split('.')[0]) for n in stored})


def test_old_versions_are_freed():
  transport, params = MemoryTransport(), make()
  publisher = VersionWriter(transport, **small_blobs(keep=2, full_every=4))
  kept = []
  for version in range(12):
    publisher.publish(version, snapshot(params))
    params = step(params, 0.001, version)
    kept.append(versions(transport))
  # The newest two, and the newest full one with all that follow it.
  assert kept[3] == [0, 1, 2, 3] and kept[4] == [3, 4] and kept[5] == [4, 5]
  assert kept[7] == [4, 5, 6, 7] and kept[8] == [7, 8]
  assert kept[11] == [8, 9, 10, 11]


def test_publishing_waits_for_who_still_reads():
  transport, params = Rough(), make()
  publisher = VersionWriter(transport, **small_blobs(keep=1, full_every=1, patience=30))
  publisher.publish(0, snapshot(params))
  reading, go = threading.Event(), threading.Event()

  def slow(name, data):
    if threading.current_thread().name.startswith('weights') and '-0-' in name:
      reading.set()
      go.wait(10)
    return data

  transport.spoil = slow
  receiver = VersionReader(transport, threads=1)
  reader = threading.Thread(target=receiver.poll)
  reader.start()
  assert reading.wait(10)
  publisher.publish(1, snapshot(make(1)))  # there is room for one more
  writer = threading.Thread(target=publisher.publish, args=(2, snapshot(make(2))))
  writer.start()
  time.sleep(0.1)
  assert writer.is_alive() and publisher.version == 1 and versions(transport) == [0, 1]
  go.set()
  reader.join(10), writer.join(10)
  assert receiver.version == 0 and same(receiver.params(), params)
  assert publisher.version == 2
  publisher.repair()
  assert versions(transport) == [2]


def test_nobody_waits_for_the_dead():
  transport = MemoryTransport()
  publisher = VersionWriter(
    transport, **small_blobs(keep=1, full_every=1, patience=0.2)
  )
  publisher.publish(0, snapshot(make()))
  dead = VersionReader(transport)._parts[0].heartbeat  # died while it read version 0
  dead.start_reading(publisher._writer_id, 0)
  publisher.publish(1, snapshot(make(1)))
  begun = time.perf_counter()
  assert publisher.publish(2, snapshot(make(2))).wait_s > 0.1
  assert time.perf_counter() - begun < 5
  assert versions(transport) == [2] and transport.names('0-reader-') == []
