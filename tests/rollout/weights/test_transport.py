"""Shared memory and folders between real processes, some of which are killed."""

import os
import pathlib
import signal
import stat
import subprocess
import sys
import time

import pytest

from jaxrl.rollout.weights.publisher import (
  SharedFolderOptions,
  SharedMemoryOptions,
  VersionWriter,
)
from jaxrl.rollout.weights.snapshots import snapshot
from jaxrl.rollout.weights.subscriber import VersionReader
from jaxrl.rollout.weights.transport import (
  _DRAFT_PREFIX,
  FolderTransport,
  SharedMemoryTransport,
  WeightsError,
  remove_abandoned,
)
from launch.runtime.weight_transport import open_transport
from launch.settings.run_settings import WeightTransport
from tests.marks import slow
from tests.rollout.weights.helpers import SMALL, make, same, small_blobs, step

# Follows what is published at argv[1] and prints version and digest of what it holds.
FOLLOW = """
import sys, time
from jaxrl.rollout.weights.subscriber import VersionReader
from jaxrl.rollout.weights.transport import SharedMemoryTransport
receiver = VersionReader(SharedMemoryTransport(sys.argv[1]))
while receiver.version != int(sys.argv[2]):
  if receiver.poll() is None:
    time.sleep(0.005)
  else:
    print(receiver.version, receiver.digests[0], flush=True)
receiver.close()
"""
# As FOLLOW, but stops for good in the middle of reading a version.
STUCK = """
import sys, time
from jaxrl.rollout.weights.manifest_reader import ManifestReader
from jaxrl.rollout.weights.subscriber import VersionReader
from jaxrl.rollout.weights.transport import SharedMemoryTransport
def stop(*args, **options):
  print('reading', flush=True)
  time.sleep(1000)
ManifestReader.rebuild_chunk = ManifestReader.map_region = stop
receiver = VersionReader(SharedMemoryTransport(sys.argv[1]), threads=1)
while True:
  receiver.poll()
"""
# Publishes once and waits to be killed, or ends by itself.
PUBLISH = """
import sys, time
import numpy as np
from jaxrl.rollout.weights.snapshots import snapshot
from jaxrl.rollout.weights.publisher import VersionWriter
from jaxrl.rollout.weights.transport import SharedMemoryTransport
shared = SharedMemoryTransport()
publisher = VersionWriter(shared)
publisher.publish(0, snapshot({'w': np.ones(1000)}))
print(shared.address, flush=True)
if sys.argv[1] == 'wait':
  time.sleep(1000)
"""
# Publishes ever new versions at argv[1], each of one number, until it is killed.
ENDLESS = """
import sys
import numpy as np
from jaxrl.rollout.weights.snapshots import snapshot
from jaxrl.rollout.weights.publisher import VersionWriter, VersionWriterOptions
from jaxrl.rollout.weights.transport import FolderTransport
publisher = VersionWriter(
  FolderTransport(sys.argv[1], durable=False),
  options=VersionWriterOptions(full_every=4),
)
for version in range(10**9):
  publisher.publish(version, snapshot({'w': np.full((64, 4096), version, np.int32)}))
  print(version, flush=True)
"""


def start(program, *args):
  return subprocess.Popen(
    [sys.executable, '-c', program, *map(str, args)],
    stdout=subprocess.PIPE,
    text=True,
    cwd=pathlib.Path(__file__).parents[3],
    env={**os.environ, 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''},
  )


@pytest.fixture
def shared():
  shared = SharedMemoryTransport()
  yield shared
  shared.close()
  assert not shared.path.exists()


@pytest.mark.slow
def test_engines_in_processes_of_their_own_and_one_that_is_killed(shared):
  last = 30
  readers = [start(FOLLOW, shared.address, last) for _ in range(2)]
  stuck = start(STUCK, shared.address)
  publisher = VersionWriter(shared, **small_blobs(keep=1, full_every=1, patience=1.0))
  params, digests = make(), {}
  publisher.publish(0, snapshot(params))
  digests['0'] = publisher.digest
  assert stuck.stdout.readline() == 'reading\n'
  stuck.send_signal(signal.SIGKILL)  # it died holding version 0
  stuck.wait()
  waited = 0.0
  for version in range(1, last + 1):
    params = step(params, 0.01, version)
    report = publisher.publish(version, snapshot(params))
    waited = max(waited, report.wait_s)
    digests[str(version)] = publisher.digest
    publisher.repair()
  late = start(FOLLOW, shared.address, last)
  for reader in (*readers, late):
    while reader.poll() is None:
      publisher.repair()
      time.sleep(0.01)
    seen = dict(line.split() for line in reader.stdout.read().splitlines())
    assert reader.returncode == 0 and str(last) in seen
    assert seen.items() <= digests.items()  # whatever it saw was whole
  assert 0.1 < waited < 5  # for the dead one, and only as long as was said
  versions = {name.split('-')[3][:2] for name in shared.names('0-run-')}
  assert versions <= {'29', '30'} and len(shared.names('')) < 20


@pytest.mark.parametrize('transport', ['shared_memory', slow('checkpoint')])
def test_what_a_killed_learner_leaves_is_freed_by_the_next(transport, tmp_path):
  killed = start(PUBLISH, 'wait')
  path = pathlib.Path(killed.stdout.readline().strip())
  assert path.is_dir() and path not in remove_abandoned()  # it lives
  killed.kill()
  killed.wait()
  assert path.is_dir()
  options = {
    'shared_memory': SharedMemoryOptions(),
    'checkpoint': SharedFolderOptions(folder=str(tmp_path)),
  }
  open_transport(WeightTransport(transport, options[transport])).close()
  assert not path.exists()


@pytest.mark.slow
def test_a_learner_that_ends_cleans_up():
  ended = start(PUBLISH, 'end')
  path = pathlib.Path(ended.stdout.readline().strip())
  assert ended.wait() == 0 and not path.exists()


def test_shared_memory_is_the_users_own(shared):
  assert stat.S_IMODE(shared.path.stat().st_mode) == 0o700
  other = SharedMemoryTransport()
  assert other.address != shared.address
  other.close()
  with pytest.raises(WeightsError, match='no weights are published there'):
    SharedMemoryTransport(other.address)
  attached = SharedMemoryTransport(shared.address)
  attached.close()
  assert shared.path.exists()  # only its maker removes it
  with pytest.raises(WeightsError, match='nobody publishes weights there'):
    attached.path = other.path
    attached.put('a', b'')


@pytest.mark.parametrize('make_transport', [SharedMemoryTransport, None])
def test_files_appear_whole_and_last_while_they_are_read(make_transport, tmp_path):
  transport = make_transport() if make_transport else FolderTransport(tmp_path)
  transport.put('a', b'one')
  view = transport.get('a')
  transport.put('a', b'other')
  assert bytes(view) == b'one' and bytes(transport.get('a')) == b'other'
  transport.put('b', b'')
  assert bytes(transport.get('b')) == b''
  assert sorted(transport.names('')) == ['a', 'b']
  transport.delete('a'), transport.delete('a')
  with pytest.raises(KeyError):
    transport.get('a')
  for bad in ('../a', 'a/b', '.a', ''):
    with pytest.raises(ValueError, match='not a name for weights'):
      transport.put(bad, b'')
  transport.close()


def test_a_folder_outlives_learners_and_forgets_their_drafts(tmp_path):
  folder = tmp_path / 'weights'
  for seed, versions in ((0, range(3)), (1, range(1, 4))):
    publisher, params = VersionWriter(FolderTransport(folder), **SMALL), make(seed)
    for version in versions:
      params = step(params, 0.01, version)
      publisher.publish(version, snapshot(params))
    publisher.close()
    receiver = VersionReader(
      FolderTransport(folder)
    )  # an evaluation, when the learner has ended
    assert receiver.poll() == versions[-1] and same(receiver.params(), params)
    receiver.close()
  old, new = (folder / f'{_DRAFT_PREFIX}{name}' for name in ('old', 'new'))
  for draft in (old, new):
    draft.write_bytes(b'half')
  os.utime(old, (0, 0))
  assert not any(
    name.startswith(_DRAFT_PREFIX) for name in FolderTransport(folder).names('0')
  )
  assert not old.exists() and new.exists()


@pytest.mark.slow
def test_a_learner_killed_while_it_publishes_leaves_a_whole_version(tmp_path):
  receiver = VersionReader(FolderTransport(tmp_path))
  for number in range(3):
    killed = start(ENDLESS, tmp_path)
    for _ in range(5 + 3 * number):
      killed.stdout.readline()
    time.sleep(0.003 * number)
    killed.kill()
    killed.wait()
    receiver.poll()
    whole = receiver.params()['w']
    assert receiver.problem is None and receiver.version >= 4
    assert (whole == receiver.version).all()


def test_a_place_that_is_full_says_so(tmp_path, monkeypatch):
  folder = FolderTransport(tmp_path)

  def full(*_):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(os, 'replace', full)
  with pytest.raises(WeightsError, match=r'1,000 bytes .* No space left .* Free some'):
    folder.put('a', bytes(1000))
  assert list(tmp_path.iterdir()) == []
