"""Checkpoints survive death, full disks and other meshes."""

import errno
import gc
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest
import tensorstore
from etils import epath
from orbax.checkpoint._src.serialization import tensorstore_utils

from jaxrl.algorithms import registry
from jaxrl.training.checkpointing import (
  CHECKSUMS,
  Checkpointer,
  CheckpointError,
  CheckpointOptions,
)
from jaxrl.training.parallelism.mesh import MeshOptions, make_mesh
from tests import processes
from tests.training import toy

ROOT = pathlib.Path(__file__).parents[2]


def arrays(value: float, size: int = 8):
  return {'w': jax.numpy.full((size, size), value), 'n': jax.numpy.int32(value)}


def test_the_newest_are_kept_and_come_back(tmp_path):
  checkpointer = Checkpointer(tmp_path / 'a', CheckpointOptions(max_to_keep=2))
  assert checkpointer.latest_step is None
  data = {'list': [1, 2.5, None], 'big': 2**70, 'text': 'é', 'nested': {'a': True}}
  for step in range(1, 5):
    checkpointer.save(step, arrays(step), data | {'step': step})
  checkpointer.close()
  again = Checkpointer(tmp_path / 'a')
  assert again.latest_step == 4
  assert sorted(p.name for p in (tmp_path / 'a').iterdir()) == ['3', '4']
  restored, meta = again.restore(arrays(0))
  assert float(restored['w'][0, 0]) == 4 and meta == data | {'step': 4}
  restored, meta = again.restore(arrays(0), step=3)
  assert int(restored['n']) == 3 and meta['step'] == 3
  again.save(4, arrays(9), {})  # there already: left as it is
  assert int(again.restore(arrays(0))[0]['n']) == 4
  again.close()


def test_what_tensorstore_leaks_is_not_asked_for(tmp_path, monkeypatch):
  calls = []

  class Spec:
    """Counts the locations that are made."""

    def __new__(cls, location):
      calls.append(location)
      return tensorstore.KvStore.Spec(location)

  store = types.SimpleNamespace(Spec=Spec, open=tensorstore.KvStore.open)
  names = vars(tensorstore_utils.ts) | {'KvStore': store}
  monkeypatch.setattr(tensorstore_utils, 'ts', types.SimpleNamespace(**names))
  checkpointer = Checkpointer(tmp_path)
  tree = {f'w{i}': jax.numpy.full((4,), i) for i in range(30)}
  checkpointer.save(1, tree, {})
  checkpointer.wait()
  assert 0 < len(calls) < 15  # not one for every array
  restored, _ = checkpointer.restore(tree)
  assert all(int(restored[f'w{i}'][0]) == i for i in range(30))
  checkpointer.close()
  leaks = [one for one in gc.get_objects() if type(one) is dict and 'name' in one]
  assert not [one for one in leaks if str(one['name']).startswith('/tensorstore/')]


def test_what_is_saved_may_change_at_once(tmp_path):
  """The arrays handed over are donated to a step right after."""
  checkpointer = Checkpointer(tmp_path)
  step = jax.jit(lambda x: jax.tree.map(lambda y: y + 1, x), donate_argnums=0)
  tree = arrays(0, size=1000)
  for number in range(4):
    checkpointer.save(number, tree, {})
    for _ in range(10):
      tree = step(tree)
  restored, _ = checkpointer.restore(arrays(0, size=1000))
  assert set(np.unique(restored['w'])) == {30}
  checkpointer.close()


def test_another_shape_names_the_parameter(tmp_path):
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, arrays(1), {})
  with pytest.raises(CheckpointError, match=r'1 in .*: w has shape \(8, 8\), .*\(9, 9'):
    checkpointer.restore(arrays(0, size=9))
  with pytest.raises(CheckpointError, match='has no array v;'):
    checkpointer.restore(arrays(0) | {'v': jax.numpy.ones(2)})
  with pytest.raises(CheckpointError, match=r'unknown array w;.*algorithm'):
    checkpointer.restore({'n': jax.numpy.int32(0)})
  checkpointer.close()


def test_no_checkpoint_is_a_clear_error(tmp_path):
  with pytest.raises(CheckpointError, match='there is no checkpoint in'):
    Checkpointer(tmp_path).restore(arrays(0))


async def run(tmp_path, steps, stop=None, **options):
  """Trains to `steps`, or to `stop`, from the newest checkpoint; the final arrays."""
  learner = toy.learner(registry.make('grpo'), num_minibatches=2, **options)
  checkpointer = Checkpointer(tmp_path)
  if checkpointer.latest_step is not None:
    assert await learner.restore(checkpointer) == {'seen': learner.step}
  for step in range(learner.step, steps if stop is None else stop):
    await learner.update(toy.groups(step))
    if step % 2:
      await learner.save(checkpointer, {'seen': step + 1})
  checkpointer.close()
  return jax.tree.map(np.asarray, learner._arrays())


async def test_resumed_is_uninterrupted_bit_for_bit(tmp_path):
  whole = await run(tmp_path / 'a', 6)
  await run(tmp_path / 'b', 6, stop=3)
  resumed = await run(tmp_path / 'b', 6)
  jax.tree.map(np.testing.assert_array_equal, whole, resumed)


async def test_another_mesh_restores_the_same_bits(tmp_path):
  saved = toy.learner(
    registry.make('grpo'), mesh=make_mesh(MeshOptions(fsdp=4, tensor=2))
  )
  await saved.update(toy.groups())
  checkpointer = Checkpointer(tmp_path)
  await saved.save(checkpointer, {'a': 1}, wait=True)
  for mesh in (make_mesh(MeshOptions(fsdp=2, tensor=4)), None):
    learner = toy.learner(registry.make('grpo'), mesh=mesh)
    assert await learner.restore(checkpointer) == {'a': 1}
    assert learner.step == 1
    jax.tree.map(np.testing.assert_array_equal, saved._arrays(), learner._arrays())
    shards = learner.params['bigram']['table'].sharding.mesh
    assert shards == learner.mesh
  checkpointer.close()


CHILD = """
import sys
import jax, jax.numpy as jnp
from jaxrl.training.checkpointing import Checkpointer, CheckpointOptions
checkpointer = Checkpointer(sys.argv[1], CheckpointOptions(max_to_keep=2))
start = checkpointer.latest_step or 0
make = jax.jit(lambda s: {f'w{i}': jnp.full((400, 1000), s) for i in range(4)})
for step in range(start + 1, 1000):
  checkpointer.save(step, make(float(step)), {'step': step})
  print(step, flush=True)
"""


def test_killed_at_any_moment_the_newest_whole_one_loads(tmp_path):
  """A process that saves all the time is killed at odd moments, again and again."""
  environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'XLA_FLAGS': ''}
  like = {f'w{i}': jax.numpy.zeros((400, 1000)) for i in range(4)}
  newest = 0
  for delay in (0.0, 0.03):
    child = subprocess.Popen(
      [sys.executable, '-c', CHILD, str(tmp_path)],
      stdout=subprocess.PIPE,
      text=True,
      env=environment,
    )
    started = [int(child.stdout.readline()) for _ in range(3)]
    time.sleep(delay)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    checkpointer = Checkpointer(tmp_path)
    # A save starts when the one before is complete.
    assert checkpointer.latest_step >= max(started[-1] - 1, newest)
    newest = checkpointer.latest_step
    restored, data = checkpointer.restore(like)
    assert data == {'step': newest}
    assert {float(x) for w in restored.values() for x in np.unique(w)} == {newest}
    checkpointer.close()
    assert not list(tmp_path.glob('*tmp*'))


FULL = """
import resource, sys
import jax.numpy as jnp
from jaxrl.training.checkpointing import Checkpointer, CheckpointError
checkpointer = Checkpointer(sys.argv[1])
noise = lambda n: {'w': jnp.sin(jnp.arange(n * 1.0) ** 2)}
checkpointer.save(1, noise(1000), {})
checkpointer.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
for attempt in (2, 3):
  try:
    checkpointer.save(attempt, noise(1_000_000), {})
    checkpointer.wait()
    print('no error')
  except CheckpointError as error:
    print(error)
checkpointer.save(4, noise(1000), {})
checkpointer.close()
"""


def test_a_full_disk_is_one_clear_error_and_loses_nothing(tmp_path):
  """A limit on the size of files stands for the full disk."""
  environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'XLA_FLAGS': ''}
  done = subprocess.run(  # without bytecode, which could be cut short too
    [sys.executable, '-B', '-c', FULL, str(tmp_path)],
    capture_output=True,
    text=True,
    env=environment,
    check=False,
  )
  lines = done.stdout.splitlines()
  assert len(lines) == 2, done.stdout + done.stderr
  assert 'checkpoint 2 could not be written' in lines[0]
  assert 'checkpoint 1 is intact' in lines[0] and '4 MiB needed' in lines[0]
  assert done.returncode == 0, done.stderr
  assert sorted(p.name for p in tmp_path.iterdir()) == ['1', '4']
  restored, _ = Checkpointer(tmp_path).restore({'w': jax.numpy.zeros(1000)}, step=1)
  assert np.abs(restored['w']).max() > 0.9


READ_ONLY = """
import os, sys
import jax.numpy as jnp
from jaxrl.training.checkpointing import Checkpointer, CheckpointError
checkpointer = Checkpointer(sys.argv[1])
checkpointer.save(1, {'w': jnp.zeros(9)}, {})
checkpointer.wait()
os.chmod(sys.argv[1], 0o555)
try:
  checkpointer.save(2, {'w': jnp.ones(9)}, {})
  checkpointer.wait()
except CheckpointError as error:
  print(error)
checkpointer.close()
"""


@pytest.mark.slow
def test_a_read_only_folder_is_one_clear_error_and_no_hang(tmp_path):
  done = subprocess.run(
    processes.obeying_modes([sys.executable, '-c', READ_ONLY, str(tmp_path)]),
    capture_output=True,
    text=True,
    env={**os.environ, 'PYTHONPATH': str(ROOT), 'XLA_FLAGS': ''},
    timeout=60,  # threads of orbax used to wait for ten minutes
    check=True,
  )
  tmp_path.chmod(0o755)
  (line,) = done.stdout.splitlines()
  assert f'{tmp_path}, which is read-only; checkpoint 1 is intact' in line
  assert 'Make it writable' in line and not done.stderr
  assert [path.name for path in tmp_path.iterdir()] == ['1']


def corrupt(path, how):
  """Damages a checkpoint; returns what is said about it."""
  data = max(path.glob('state/**/d/*'), key=lambda file: file.stat().st_size)
  content = data.read_bytes()
  if how == 'flipped byte':
    middle = len(content) // 2
    flipped = bytes([content[middle] ^ 1])
    data.write_bytes(content[:middle] + flipped + content[middle + 1 :])
    return 'has changed since it was written'
  if how == 'truncated':
    data.write_bytes(content[:-1])
    return f'has {len(content) - 1:,} bytes instead of {len(content):,}'
  if how == 'empty':
    (path / 'data' / 'data.json').write_bytes(b'')
    return 'data/data.json has 0 bytes instead of'
  if how == 'no metadata':
    (path / '_CHECKPOINT_METADATA').unlink()
    return '_CHECKPOINT_METADATA is missing'
  if how == 'only the folder':
    shutil.rmtree(path / 'state')
    shutil.rmtree(path / 'data')
    return 'is missing'
  if how == 'garbled checksums':
    (path / CHECKSUMS).write_text('[' * 100_000)
    return f'{CHECKSUMS} is not readable'
  data.unlink()
  return f'{data.name} is missing'


HOW = [
  'flipped byte',
  'truncated',
  'empty',
  'missing',
  'no metadata',
  'only the folder',
  'garbled checksums',
]


@pytest.mark.parametrize('how', HOW)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_used(
  tmp_path, how, caplog
):
  checkpointer = Checkpointer(tmp_path)
  for step in (1, 2):
    checkpointer.save(step, arrays(step), {'step': step})
  checkpointer.close()
  message = corrupt(tmp_path / '2', how)
  strict = Checkpointer(tmp_path, CheckpointOptions(strict=True))
  assert strict.latest_step == 2
  with pytest.raises(CheckpointError, match=r'checkpoint 2 .* is damaged') as error:
    strict.restore(arrays(0))
  assert message in str(error.value) and '\n' not in str(error.value)
  strict.close()
  again = Checkpointer(tmp_path)
  restored, data = again.restore(arrays(0))
  assert int(restored['n']) == 1 and data == {'step': 1}
  (line,) = [r.getMessage() for r in caplog.records if 'is damaged' in r.msg]
  assert message in line and '2.damaged' in line
  assert again.latest_step == 1
  again.save(2, arrays(7), {'step': 2})  # the step is repeated
  again.close()
  last = Checkpointer(tmp_path)
  assert int(last.restore(arrays(0))[0]['n']) == 7
  last.close()


def test_without_an_intact_checkpoint_nothing_begins_anew(tmp_path):
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, arrays(1), {})
  checkpointer.wait()
  corrupt(tmp_path / '1', 'flipped byte')
  with pytest.raises(CheckpointError, match=r'no checkpoint in .* is intact'):
    checkpointer.restore(arrays(0))
  assert checkpointer.latest_step == 1  # so the next attempt does not begin anew either
  checkpointer.close()


def test_a_checkpoint_without_checksums_is_restored(tmp_path):
  """Earlier versions wrote none. What cannot be read is passed over all the same."""
  checkpointer = Checkpointer(tmp_path)
  for step in (1, 2):
    checkpointer.save(step, arrays(step), {})
    checkpointer.wait()
    (tmp_path / str(step) / CHECKSUMS).unlink()
  assert int(checkpointer.restore(arrays(0))[0]['n']) == 2
  corrupt(tmp_path / '2', 'truncated')
  assert int(checkpointer.restore(arrays(0))[0]['n']) == 1
  checkpointer.close()


def test_a_save_that_fails_prints_no_traceback(tmp_path, capfd, caplog, monkeypatch):
  """The error of the save is not replaced by one of closing."""
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, arrays(1), {})
  checkpointer.wait()
  write_text = pathlib.Path.write_text

  def fail(path, text, *args, **options):
    if '2.orbax' in str(path):
      raise OSError(errno.ENOSPC, 'No space left on device')
    return write_text(path, text, *args, **options)

  for path_class in {type(tmp_path), type(epath.Path(tmp_path))}:
    monkeypatch.setattr(path_class, 'write_text', fail)
  with pytest.raises(CheckpointError, match='checkpoint 1 is intact'):
    checkpointer.save(2, arrays(2), {})
    checkpointer.wait()
  checkpointer.close()
  assert 'Traceback' not in ''.join(capfd.readouterr()) + caplog.text
