"""Killed or stopped at any moment, the same command ends at the same bits."""

import pathlib
import shutil
import signal
import time

import pytest

from tests.launch import runs
from tests.marks import extended

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
  """Waits until `true()`; whether it was, if the process ends before."""
  while not true():
    if process.poll() is not None:
      return true()
    time.sleep(0.01)
  return True


def has(folder, phase, step):
  path = folder / 'metrics.jsonl'
  mark = f'"phase": "{phase}", "step": {step},'
  return path.exists() and mark in path.read_text()


@pytest.mark.slow
@pytest.mark.extended
def test_interrupted_in_sft_it_stops_with_130_and_starts_no_rl(whole, tmp_path):
  process = runs.spawn(tmp_path, *STEPS)
  assert when(process, lambda: has(tmp_path, 'sft', 0))
  process.send_signal(signal.SIGINT)
  output, _ = process.communicate(timeout=120)
  assert process.returncode == 130, output
  assert 'Stopped; the same command resumes.' in output
  assert not runs.rows(tmp_path) and not (tmp_path / 'export').exists()
  runs.run(tmp_path, *STEPS)
  same(tmp_path, whole)


MOMENTS = {  # none of them passes: once true, it stays so
  'model': lambda folder: (folder / 'model' / 'config.json').exists(),
  'sft': lambda folder: has(folder, 'sft', 1),
  'sft-end': lambda folder: has(folder, 'sft', 3),
  'train-begin': lambda folder: (folder / 'checkpoints' / 'train').exists(),
  'rl': lambda folder: has(folder, 'train', 0),
  'rl-end': lambda folder: has(folder, 'train', 3),
  'last': lambda folder: has(folder, 'train', 4),
}


@pytest.mark.slow
@pytest.mark.parametrize(
  'every, blows',
  [
    (
      1,
      {'sft-end': signal.SIGKILL, 'rl': signal.SIGINT, 'rl-end': signal.SIGKILL},
    ),
    extended(1, {'model': signal.SIGKILL, 'train-begin': signal.SIGKILL}),
    extended(2, {'sft': signal.SIGKILL, 'rl': signal.SIGKILL, 'last': signal.SIGINT}),
  ],
)
def test_any_moment(whole, tmp_path, every, blows):
  """One run is killed or interrupted at each of these moments, one after another."""
  options = (*STEPS, f'--config.checkpoint.save_interval={every}')
  for moment, number in blows.items():
    process = runs.spawn(tmp_path, *options)
    reached = when(process, lambda moment=moment: MOMENTS[moment](tmp_path))
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert reached, (moment, output)
    if number == signal.SIGINT:
      assert process.returncode in (0, 130), output
      assert 'Traceback' not in output
  runs.run(tmp_path, *options)
  same(tmp_path, whole)


@pytest.mark.slow
def test_from_before_a_damaged_checkpoint_it_ends_at_the_same_bits(whole, tmp_path):
  folder = tmp_path / 'copy'
  shutil.copytree(whole, folder)
  newest = folder / 'checkpoints' / 'train' / '4'
  file = max(newest.glob('state/**/d/*'), key=lambda path: path.stat().st_size)
  file.write_bytes(file.read_bytes()[:-1])
  process = runs.spawn(folder, *STEPS, '--config.checkpoint.strict=True')
  output, _ = process.communicate(timeout=120)
  assert process.returncode == 1 and 'Traceback' not in output
  assert 'error: checkpoint 4 in' in output and 'is damaged' in output
  process = runs.spawn(folder, *STEPS)
  output, _ = process.communicate(timeout=120)
  assert process.returncode == 0, output
  assert output.count('is damaged') == 1 and 'checkpoint 3 is used' in output
  same(folder, whole)


@pytest.mark.slow
def test_a_finished_run_is_left_as_it_is(whole, capsys):
  before = (pathlib.Path(whole) / 'metrics.jsonl').read_text()
  assert runs.main(whole, *STEPS, config=runs.VARIED) == 0
  assert 'Finished.' in capsys.readouterr().out
  assert (pathlib.Path(whole) / 'metrics.jsonl').read_text() == before
