"""CodeRunner runs a program against hidden tests in a sandbox.

The program only sees the input of a test; its output is compared outside the sandbox.
"""

import dataclasses
import json
import signal
import time
from pathlib import Path
from typing import Any

from jaxrl.envs.coding import case_worker
from jaxrl.envs.coding.hidden_tests import HiddenTest
from jaxrl.envs.sandbox.local_sandbox import PYTHON_PATH, LocalSandbox
from jaxrl.envs.sandbox.sandbox_api import MIB, SandboxLimits

Report = dict[str, Any]  # what the worker writes about one test


@dataclasses.dataclass(frozen=True)
class CaseResult:
  """The result of one test of a program.

  Attributes:
    verdict: 'passed', 'wrong', 'error', or the limit that ended it.
    output: What the program printed or returned; empty if that is unknown.
    stderr: The end of what it wrote to stderr.
  """

  verdict: str
  output: str = ''
  stderr: str = ''


class CodeRunner:
  """Judges programs, each in its own sandbox; may be used from many threads.

  Args:
    seconds: Wall-clock and CPU seconds of one test.
    total_seconds: Wall-clock seconds of all tests; tests that are not reached fail.
    memory_mb: The memory of a program and all that it starts.
    processes: The number of processes of a program.
    output_mb: The output of one test.
    unsafe: Also run where the kernel allows no sandbox, with everything that the
      program can then do to this machine.

  Raises:
    SandboxError: If there is no sandbox and `unsafe` is not set.
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
    self._seconds = seconds
    self._output_bytes = output_mb * MIB
    self._total_seconds = total_seconds
    self._unsafe = unsafe
    self._limits = SandboxLimits(
      memory=memory_mb * MIB,
      processes=processes + 1,  # the worker that runs the tests is one
      output=8 * self._output_bytes,
    )
    sandbox = self._sandbox()
    sandbox.start()  # fails here if there is no sandbox, not at the first program
    sandbox.stop()
    self._worker_source = Path(case_worker.__file__).read_text()

  def _sandbox(self) -> LocalSandbox:
    return LocalSandbox(limits=self._limits, unsafe=self._unsafe)

  def verdicts(self, program: str, cases: list[HiddenTest]) -> list[str]:
    """Runs all tests.

    Args:
      program: The source of the program.
      cases: The tests.

    Returns:
      The verdict of each test; see `CaseResult`.
    """
    return [result.verdict for result in self.run(program, cases)]

  def run(self, program: str, cases: list[HiddenTest]) -> list[CaseResult]:
    """Runs all tests.

    Args:
      program: The source of the program.
      cases: The tests.

    Returns:
      The result of each test.
    """
    results: list[CaseResult] = []
    deadline = time.monotonic() + self._total_seconds
    sandbox = self._sandbox()
    sandbox.start()
    try:
      while len(results) < len(cases):
        seconds_left = deadline - time.monotonic()
        if seconds_left <= 0:
          return results + [CaseResult('time')] * (len(cases) - len(results))
        results += self._run_tests(
          sandbox, program, cases[len(results) :], seconds_left
        )
    finally:
      sandbox.stop()
    return results

  def _run_tests(
    self, sandbox: LocalSandbox, program: str, cases: list[HiddenTest], seconds: float
  ) -> list[CaseResult]:
    """Returns the results of these tests, up to one that ended the worker."""
    job = {
      'program': program,
      'cases': [case.request for case in cases],
      'seconds': self._seconds,
      'output_bytes': self._output_bytes,
    }
    command = [PYTHON_PATH, '-I', '-c', self._worker_source]
    stdin = json.dumps(job).encode()
    result = sandbox.exec(command, stdin=stdin, seconds=seconds)
    results: list[CaseResult] = []
    for case, line in zip(cases, result.stdout.splitlines(), strict=False):
      report = _parse_report(line)
      if report is None:
        break
      verdict = _verdict(case, report)
      results.append(CaseResult(verdict, report['output'], report['stderr']))
    # The limit is on all tests together, so the rest run again.
    output_exceeded = result.limit == 'output' and results
    if len(results) < len(cases) and not output_exceeded:
      results.append(CaseResult(result.limit or 'error'))
    return results


def _parse_report(line: bytes) -> Report | None:
  """Parses a line about a test; returns None if the program garbled it."""
  try:
    report = json.loads(line)
  except (ValueError, RecursionError):
    return None
  kinds = {'output': str, 'stderr': str, 'code': int, 'limit': str}
  if not isinstance(report, dict):
    return None
  valid = all(type(report.get(key)) is kind for key, kind in kinds.items())
  return report if valid else None


def _verdict(case: HiddenTest, report: Report) -> str:
  if report['limit'] in ('time', 'output'):
    return report['limit']
  if report['code'] == -signal.SIGXCPU:
    return 'time'
  if report['code'] != 0:
    return 'error'
  return 'passed' if case.passed(report['output']) else 'wrong'
