"""Killed or stopped at any moment, the same command ends at the same bits."""

import pathlib
import random
import signal
import time

import pytest

from tests.launch import runs

pytestmark = pytest.mark.xdist_group('resume')  # they share one whole run
STEPS = (
  '--config.num_steps=4',
  '--config.sft.num_steps=4',
  '--config.eval.num_tasks=4',
)


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """A run that nobody disturbs."""
  folder = tmp_path_factory.mktemp('whole')
  runs.run(folder, *STEPS)
  assert any(row['optimizer/grad_norm'] > 0 for row in runs.rows(folder)[:-1])
  return folder


def steps(folder, phase='train'):
  return [row['step'] for row in runs.rows(folder, phase)]


def same(folder, whole):
  assert steps(folder, 'sft') == [0, 1, 2, 3]
  assert steps(folder) == [0, 1, 2, 3, 4]
  assert runs.numbers(folder) == runs.numbers(whole)
  assert runs.weights(folder) == runs.weights(whole)


def when(process, true):
  """Waits until `true()`; False if the process ends before."""
  while not true():
    if process.poll() is not None:
      return False
    time.sleep(0.002)
  return True


def has(folder, phase, step):
  path = folder / 'metrics.jsonl'
  mark = f'"phase": "{phase}", "step": {step},'
  return path.exists() and mark in path.read_text()


def writing(folder, phase):
  """A checkpoint of the phase is half-written."""
  return any((folder / 'checkpoints' / phase).glob('*orbax-checkpoint-tmp*'))


def kill(process):
  process.kill()
  process.communicate()


def test_killed_in_rl_it_ends_at_the_same_bits(whole, tmp_path):
  process = runs.spawn(tmp_path, *STEPS)
  assert when(process, lambda: has(tmp_path, 'train', 1)), process.communicate()[0]
  kill(process)
  assert not (tmp_path / 'export').exists()
  runs.run(tmp_path, *STEPS)
  same(tmp_path, whole)


def test_interrupted_in_sft_it_stops_with_130_and_starts_no_rl(whole, tmp_path):
  process = runs.spawn(tmp_path, *STEPS)
  assert when(process, lambda: has(tmp_path, 'sft', 0))
  process.send_signal(signal.SIGINT)
  said, _ = process.communicate(timeout=120)
  assert process.returncode == 130, said
  assert 'Stopped; the same command resumes.' in said
  assert not runs.rows(tmp_path) and not (tmp_path / 'export').exists()
  runs.run(tmp_path, *STEPS)
  same(tmp_path, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
  'moment',
  [
    lambda folder: (folder / 'model' / 'config.json').exists(),
    lambda folder: has(folder, 'sft', 1),
    lambda folder: writing(folder, 'sft'),
    lambda folder: has(folder, 'sft', 3),
    lambda folder: (folder / 'checkpoints' / 'train').exists(),
    lambda folder: has(folder, 'train', 0),
    lambda folder: writing(folder, 'train'),
    lambda folder: has(folder, 'train', 3),
    lambda folder: (folder / 'checkpoints' / 'train' / '4').exists(),
    lambda folder: has(folder, 'train', 4),
  ],
  ids='model sft sft-save sft-end train-begin rl rl-save rl-end last done'.split(),
)
@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGINT], ids=['kill', 'int'])
@pytest.mark.parametrize('every', [1, 2])
def test_any_moment(whole, tmp_path, moment, number, every):
  options = (*STEPS, f'--config.checkpoint.every={every}')
  process = runs.spawn(tmp_path, *options)
  reached = when(process, lambda: moment(tmp_path))
  process.send_signal(number)
  said, _ = process.communicate(timeout=120)
  assert reached, said
  if number == signal.SIGINT:
    assert process.returncode in (0, 130), said
    assert 'Traceback' not in said
  runs.run(tmp_path, *options)
  same(tmp_path, whole)


@pytest.mark.slow
@pytest.mark.parametrize('seed', [0, 1])
def test_killed_again_and_again(whole, tmp_path, seed):
  rng = random.Random(seed)
  for _ in range(8):
    process = runs.spawn(tmp_path, *STEPS)
    begun = time.monotonic()
    wait = rng.uniform(1.0, 20.0)
    when(process, lambda begun=begun, wait=wait: time.monotonic() - begun > wait)
    kill(process)
  runs.run(tmp_path, *STEPS)
  same(tmp_path, whole)


def test_a_finished_run_is_left_as_it_is(whole):
  before = (pathlib.Path(whole) / 'metrics.jsonl').read_text()
  assert 'Finished.' in runs.run(whole, *STEPS)
  assert (pathlib.Path(whole) / 'metrics.jsonl').read_text() == before
