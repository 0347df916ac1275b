"""Runs a program against hidden tests, in a sandbox; what the program sees of a test
is its input, and what it says is compared out here.
"""

import json
import signal
import time
from pathlib import Path
from typing import Any

from jaxrl.envs import code_cases
from jaxrl.envs.code_tests import Case
from jaxrl.envs.sandbox.base import MIB, Limits
from jaxrl.envs.sandbox.local import PYTHON, LocalSandbox


class CodeRunner:
  """Judges programs, each in a sandbox of its own; may be used from many threads.

  seconds: wall clock and CPU of one test; total_seconds: of all of them, those not
  reached are failed. memory_mb, processes: of a program and all that it starts.
  output_mb: of one test. unsafe: run also where the kernel allows no sandbox, with
  all that the program can then do to this machine; SandboxError without it.
  """

  def __init__(
    self,
    *,
    seconds: float = 4.0,
    total_seconds: float = 30.0,
    memory_mb: int = 256,
    processes: int = 16,
    output_mb: int = 1,
    unsafe: bool = False,
  ):
    self._seconds, self._output = seconds, output_mb * MIB
    self._total_seconds, self._unsafe = total_seconds, unsafe
    self._limits = Limits(
      memory=memory_mb * MIB,
      processes=processes + 1,  # the player of the tests is one
      output=8 * self._output,
    )
    sandbox = self._sandbox()
    sandbox.start()  # refuses here, not at the first program
    sandbox.stop()
    self._player = Path(code_cases.__file__).read_text()

  def _sandbox(self) -> LocalSandbox:
    return LocalSandbox(limits=self._limits, unsafe=self._unsafe)

  def verdicts(self, program: str, cases: list[Case]) -> list[str]:
    """For each test 'passed', 'wrong', 'error', or the limit that ended it."""
    found: list[str] = []
    deadline = time.monotonic() + self._total_seconds
    sandbox = self._sandbox()
    sandbox.start()
    try:
      while len(found) < len(cases):
        left = deadline - time.monotonic()
        if left <= 0:
          return found + ['time'] * (len(cases) - len(found))
        found += self._play(sandbox, program, cases[len(found) :], left)
    finally:
      sandbox.stop()
    return found

  def _play(
    self, sandbox: LocalSandbox, program: str, cases: list[Case], seconds: float
  ) -> list[str]:
    """Verdicts of these cases, or of the first of them up to one that ended it all."""
    job = {
      'program': program,
      'cases': [case.ask for case in cases],
      'seconds': self._seconds,
      'output': self._output,
    }
    command, stdin = [PYTHON, '-I', '-c', self._player], json.dumps(job).encode()
    result = sandbox.exec(command, stdin=stdin, seconds=seconds)
    found: list[str] = []
    for case, line in zip(cases, result.stdout.splitlines(), strict=False):
      told = _read(line)
      if told is None:
        break
      found.append(_verdict(case, told))
    much = result.limit == 'output' and found  # together; the rest get another go
    if len(found) < len(cases) and not much:
      found.append(result.limit or 'error')
    return found


def _read(line: bytes) -> dict[str, Any] | None:
  """What a line tells of a case. The program may have written it: None if garbled."""
  try:
    told = json.loads(line)
  except (ValueError, RecursionError):
    return None
  kinds = {'said': str, 'code': int, 'limit': str}
  if not isinstance(told, dict):
    return None
  fine = all(type(told.get(key)) is kind for key, kind in kinds.items())
  return told if fine else None


def _verdict(case: Case, told: dict[str, Any]) -> str:
  if told['limit'] in ('time', 'output'):
    return told['limit']
  if told['code'] == -signal.SIGXCPU:
    return 'time'
  if told['code'] != 0:
    return 'error'
  return 'passed' if case.passed(told['said']) else 'wrong'


def last_block(reply: str) -> str:
  """What the last closed ``` block of a reply holds; '' when there is none."""
  block: list[str] | None = None
  last = ''
  for line in reply.splitlines(keepends=True):
    fence = line.strip().startswith('```')
    if fence and block is None:
      block = []
    elif fence and block is not None and line.strip() == '```':
      last, block = ''.join(block), None
    elif block is not None:
      block.append(line)
  return last
