"""Runs over several hosts: what they say and when, and whether two learned the same."""

import json
import pathlib
import subprocess
import sys
import threading
import time

import numpy as np

from tests import hosts
from tests.launch import runs

LIMIT_S = 400  # of a run, after which its first host is ended
LINE_S = 150  # within which a line has to come


def dump_to(workdir):
  return f'--config.trajectory_dump.path={workdir}/dump'


class Run:
  """A run that the first of some hosts drives.

  Args:
    cluster: The hosts.
    workdir: The run's.
    *options: The run's.
    config: The run's.
  """

  def __init__(self, cluster, workdir, *options, config):
    self._lines = []  # with the moment of each
    address = f'--config.cluster.address={cluster[0].address}:6379'
    argv = runs.argv(workdir, *options, address, dump_to(workdir), config=config)
    self._process = cluster[0].spawn(
      *(sys.executable, '-u', '-m', 'launch.train', *argv),
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      env=hosts.ray_environment(runs.environment()),
    )
    self._reader = threading.Thread(target=self._read, daemon=True)
    self._reader.start()
    self._timer = threading.Timer(LIMIT_S, cluster[0].close)
    self._timer.daemon = True
    self._timer.start()

  def _read(self):
    for line in self._process.stdout:
      self._lines.append((time.monotonic(), line.rstrip()))

  @property
  def text(self):
    """All that the run has said."""
    return '\n'.join(line for _, line in list(self._lines))

  def lines(self, *words, since=0.0):
    """The lines with all these words since a moment; the moments by the lines."""
    return {
      line: said_at
      for said_at, line in reversed(list(self._lines))
      if said_at >= since and all(word in line for word in words)
    }

  def said(self, *words, since=0.0):
    """When the first such line came; None if none has."""
    return min(self.lines(*words, since=since).values(), default=None)

  def wait_for(self, *words, since=0.0):
    """Waits for such a line; when it came."""
    end = time.monotonic() + LINE_S
    while True:
      is_over = self._process.poll() is not None
      if (said_at := self.said(*words, since=since)) is not None:
        return said_at
      is_over |= time.monotonic() > end
      assert not is_over, f'no line with {words} in\n{self.text}'
      time.sleep(0.05)

  def wait_for_next_step(self):
    """Waits until another step has been trained; when it was."""
    return self.wait_for('train ', ' reward ', since=time.monotonic())

  def finish(self, status=0):
    """Waits for the end; what the run said."""
    ended_with = self._process.wait()
    self._timer.cancel()
    self._reader.join(timeout=10)
    assert ended_with == status, self.text
    return self.text

  def close(self):
    """Ends the run if it has not ended."""
    self._timer.cancel()
    if self._process.poll() is None:
      self._process.kill()
      self._process.wait(timeout=20)


def played(workdir):
  """The ids of all samples that a run learned from, in order."""
  samples = []
  for path in sorted((pathlib.Path(workdir) / 'dump').rglob('*.jsonl')):
    for line in path.read_text().splitlines():
      sample = json.loads(line)
      samples.append((path.name, sample['trajectory_id']))
  return samples


def check_equal(one, two, steps, *, rtol=1e-4):
  """Fails unless two runs learned the same from the same samples."""
  assert played(one) == played(two) and len(set(played(one))) == len(played(one)) > 0
  rows, rows_ = runs.numbers(one), runs.numbers(two)
  assert [row['step'] for row in rows_] == list(range(steps))
  for row, row_ in zip(rows, rows_, strict=True):
    for name in ('loss/total', 'optimizer/grad_norm', 'reward/mean', 'policy/entropy'):
      np.testing.assert_allclose(row[name], row_[name], rtol=rtol, atol=1e-6)
