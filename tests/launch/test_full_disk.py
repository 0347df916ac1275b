"""A run that cannot write any more goes on until its next checkpoint, and says so."""

import contextlib
import os
import shutil
import subprocess
import time

import pytest

from tests.launch import runs

OPTIONS = (
  '--config.sft.num_steps=0',
  '--config.eval.interval=0',
  '--config.checkpoint.save_interval=8',
  '--config.logging.sinks=report + tensorboard',
)


@pytest.fixture
def small_disk(tmp_path):
  """A file system of 6 MiB."""
  mount = ('mount', '-t', 'tmpfs', '-o', 'size=6m', 'tmpfs', str(tmp_path))
  if not shutil.which('mount') or subprocess.run(mount, capture_output=True).returncode:
    pytest.skip('file systems cannot be mounted here')
  yield tmp_path
  subprocess.run(('umount', '--lazy', str(tmp_path)), check=True)


@pytest.mark.slow
@pytest.mark.extended
def test_a_full_disk_ends_in_one_line_and_the_run_resumes(small_disk):
  pytest.importorskip('tensorboardX')
  workdir, filler = small_disk / 'run', small_disk / 'filler'
  process = runs.spawn(workdir, *OPTIONS, '--config.num_steps=40')
  while not (workdir / 'checkpoints' / 'train' / '8').exists():
    assert process.poll() is None, process.communicate()[0]
    time.sleep(0.01)
  with filler.open('wb', buffering=0) as file, contextlib.suppress(OSError):
    while file.write(bytes(4096)):
      pass
  output, _ = process.communicate(timeout=120)
  assert process.returncode == 1 and 'Traceback' not in output, output
  errors = [line for line in output.splitlines() if line.startswith('error: ')]
  assert len(errors) == 1 and 'could not be written' in errors[0]
  assert 'checkpoint 8 is intact' in errors[0] or 'checkpoint 16 is intact' in errors[0]
  assert output.count('failed and is tried again later') <= 3  # once for each sink
  filler.unlink()
  process = runs.spawn(workdir, *OPTIONS, '--config.num_steps=40')
  output, _ = process.communicate(timeout=120)
  assert process.returncode == 0, output
  assert [row['step'] for row in runs.rows(workdir)] == list(range(40))


@pytest.mark.slow
@pytest.mark.extended
def test_a_folder_that_becomes_read_only_ends_in_one_line_without_a_hang(tmp_path):
  workdir = tmp_path / 'run'

  def change_modes(folder_mode):
    for folder, *_ in os.walk(workdir):
      os.chmod(folder, folder_mode)

  def spawn():
    return runs.spawn(workdir, *OPTIONS, '--config.num_steps=40', obeys_modes=True)

  process = spawn()
  while not (workdir / 'checkpoints' / 'train' / '8').exists():
    assert process.poll() is None, process.communicate()[0]
    time.sleep(0.01)
  change_modes(0o555)
  lines = []
  for line in process.stdout:
    lines.append(line)
    if line.startswith('error: '):
      error_time = time.monotonic()
  assert process.wait() == 1 and time.monotonic() - error_time < 20
  text = ''.join(lines)
  assert 'Traceback' not in text and 'still run' not in text, text
  (error,) = [line for line in lines if line.startswith('error: ')]
  assert 'which is read-only; checkpoint 8 is intact' in error
  assert text.count('failed and is tried again later') == 1  # the report's
  steps = [row['step'] for row in runs.rows(workdir)]
  assert steps == list(range(len(steps))) and len(steps) >= 15
  process = spawn()
  output, _ = process.communicate(timeout=60)
  assert process.returncode == 2
  assert (
    output == f'error: --workdir={workdir}: cannot write there: Permission denied\n'
  )
  change_modes(0o755)
  runs.run(workdir, *OPTIONS, '--config.num_steps=40')
  assert [row['step'] for row in runs.rows(workdir)] == list(range(40))
