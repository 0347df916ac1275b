"""A run whose disk becomes full goes on until its next checkpoint, and says so."""

import contextlib
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
  said, _ = process.communicate(timeout=120)
  assert process.returncode == 1 and 'Traceback' not in said, said
  errors = [line for line in said.splitlines() if line.startswith('error: ')]
  assert len(errors) == 1 and 'could not be written' in errors[0]
  assert 'checkpoint 8 is intact' in errors[0] or 'checkpoint 16 is intact' in errors[0]
  assert said.count('failed and is tried again later') <= 3  # once for each logger
  filler.unlink()
  process = runs.spawn(workdir, *OPTIONS, '--config.num_steps=40')
  said, _ = process.communicate(timeout=120)
  assert process.returncode == 0, said
  assert [row['step'] for row in runs.rows(workdir)] == list(range(40))
