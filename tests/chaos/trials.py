"""What all campaigns share: the record of a trial, and runs of the launcher."""

import dataclasses
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from tests.launch import runs

TRACEBACK = 'Traceback (most recent call last)'
Attempt = Callable[[], str]  # returns '' if the run survived, else what went wrong
Trials = Iterator[tuple[str, Attempt]]


@dataclasses.dataclass(frozen=True)
class Campaign:
  """A kind of attack.

  Attributes:
    name: Its name.
    survival: What a run must do to survive a trial, for the table.
    trials: Yields trials, with their names, until it has no more; called with a random
      generator and a folder.
    minutes: Its share of half an hour.
  """

  name: str
  survival: str
  trials: Callable[..., Trials]
  minutes: float


@dataclasses.dataclass(frozen=True)
class Trial:
  """One trial and its outcome.

  Attributes:
    campaign: Name of the campaign.
    name: What was tried.
    fault: What went wrong; '' if the run survived.
    seconds: How long it took.
  """

  campaign: str
  name: str
  fault: str
  seconds: float


def run_campaign(campaign: Campaign, rng, folder, seconds: float) -> Iterator[Trial]:
  """Runs trials of a campaign until its time is over.

  Args:
    campaign: The campaign.
    rng: Random generator of its own.
    folder: Folder of its own.
    seconds: No trial begins later than this.

  Yields:
    Each trial once it has ended.
  """
  begin = time.monotonic()
  for name, attempt in campaign.trials(rng, folder):
    start = time.monotonic()
    if start - begin > seconds:
      return
    try:
      fault = attempt()
    except Exception as error:  # a fault of the trial counts as one of the run
      fault = f'{type(error).__name__}: {error}'
    yield Trial(campaign.name, name, fault, time.monotonic() - start)


def launch(*arguments: str, timeout: float = 180, **options) -> tuple[int | None, str]:
  """Runs `python -m launch.train` on one device.

  Args:
    *arguments: Its arguments.
    timeout: Seconds after which it counts as hung, and is killed.
    **options: Options of `subprocess.Popen`.

  Returns:
    The exit status, None if it hung, and what it printed.
  """
  # Without bytecode, which a full disk or a kill could cut short.
  command = [sys.executable, '-B', '-u', '-m', 'launch.train', *arguments]
  process = subprocess.Popen(
    command,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    errors='replace',
    cwd=runs.ROOT,
    env=runs.environment(),
    **options,
  )
  try:
    output, _ = process.communicate(timeout=timeout)
  except subprocess.TimeoutExpired:
    process.kill()
    process.communicate()
    return None, ''
  return process.returncode, output


def judge(status: int | None, output: str) -> str:
  """Returns '' for a run that ended well or said in one line why not."""
  if status is None:
    return 'it hung'
  if TRACEBACK in output:
    return f'status {status} with a traceback: {output.strip().splitlines()[-1][:200]}'
  if status == 0:
    return ''
  errors = re.findall(r'^error: .*', output, re.MULTILINE)
  if status in (1, 2) and len(errors) == 1:
    return ''
  return f'status {status} with {len(errors)} error lines: {output[-200:]!r}'
