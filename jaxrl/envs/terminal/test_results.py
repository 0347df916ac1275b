"""Test results are parsed here from a test run's JUnit report or its output.

What a test run printed is also shortened here, for the trajectory.
"""

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from jaxrl.envs.sandbox.sandbox_api import ExecResult, keep_tail
from jaxrl.envs.terminal.shell_session import describe_exit

MAX_OUTPUT_CHARS = 4000  # kept of what a test run printed

_PYTEST = re.compile(
  r'^(?:(PASSED) (\S.*)|(FAILED|ERROR|XFAIL|XPASS|SKIPPED) (\S.*?)(?: - .*)?)$'
)
_UNITTEST = re.compile(
  r'^(test\w* \([\w.]+\))(?:.*?) \.\.\. (ok|FAIL|ERROR|expected failure|skipped.*)$'
)
# unittest names a test that has a docstring by its first line, on a line of its own.
_UNITTEST_WITH_DOCSTRING = re.compile(
  r'^(\S.*?) \.\.\. +(ok|OK|FAIL|ERROR|expected failure|skipped.*)$'
)
_SYMPY = re.compile(r'^(test\w*) (ok|F|E|f|s)\b')
_PASSING = ('PASSED', 'XFAIL', 'ok', 'OK', 'expected failure', 'f')


def parse_junit_report(report: bytes, tests: Sequence[str] = ()) -> dict[str, bool]:
  """Parses a JUnit XML report of pytest.

  The report was written next to untrusted code; a garbled one yields no tests. A test
  that is reported several times has passed if it passed each time.

  Args:
    report: The XML.
    tests: The test ids of interest; a test inherited from another file can only be
      identified by them.

  Returns:
    Test ids, as pytest writes them, and whether each passed.
  """
  if b'<!' in report.replace(b'<![CDATA[', b''):
    return {}  # pytest declares no entities
  try:
    cases = list(ElementTree.fromstring(report).iter('testcase'))
  except ElementTree.ParseError:
    return {}
  passed: dict[str, bool] = {}
  id_by_address = {_address(test): test for test in tests}
  for case in cases:
    address = case.get('classname', ''), case.get('name', '')
    name = id_by_address.get(address) or _id(case)
    passed[name] = passed.get(name, True) and all(map(_is_passing, case))
  return passed


def _address(test: str) -> tuple[str, str]:
  """Returns `classname` and `name` of a test id, as pytest forms them."""
  path, bracket, rest = test.partition('[')
  file, *names = path.split('::')
  owner = [file.removesuffix('.py').replace('/', '.'), *names[:-1]]
  return '.'.join(owner), ''.join([*names[-1:], bracket, rest])


def _id(case: ElementTree.Element) -> str:
  file, owner = case.get('file', ''), case.get('classname', '')
  module = file.removesuffix('.py').replace('/', '.')
  classes = owner.removeprefix(module).strip('.')
  parts = [file, *filter(None, classes.split('.')), case.get('name', '')]
  return '::'.join(parts)


def _is_passing(part: ElementTree.Element) -> bool:
  if part.tag == 'skipped':
    return part.get('type') == 'pytest.xfail'  # it failed as it should
  return part.tag not in ('failure', 'error')


def parse_test_log(text: str) -> dict[str, bool]:
  """Parses the output of a test run.

  It knows the lines of `pytest -rA`, of unittest with `-v` (and Django), and of SymPy's
  `bin/test --verbose`. A test that is named several times has passed if it passed each
  time.

  Args:
    text: The output.

  Returns:
    Test ids and whether each passed.
  """
  passed: dict[str, bool] = {}
  for line in text.splitlines():
    line = line.rstrip()
    match = _PYTEST.match(line)
    if match:
      verdict, name = filter(None, match.groups())
    else:
      match = (
        _UNITTEST.match(line)
        or _UNITTEST_WITH_DOCSTRING.match(line)
        or _SYMPY.match(line)
      )
      if not match:
        continue
      name, verdict = match.groups()
    passed[name] = passed.get(name, True) and verdict in _PASSING
  return passed


def parse_pytest_summary(text: str) -> dict[str, bool]:
  """Parses pytest's summary only, since tests may print anything before it.

  Several summaries count as one, so that nothing printed later hides a failure.

  Args:
    text: The output.

  Returns:
    Test ids and whether each passed.
  """
  return parse_test_log(text.partition('short test summary info')[2])


def describe_run(result: ExecResult, seconds: float) -> str:
  """Describes a test run for people: how it ended, and the end of what it printed.

  Args:
    result: The result of the test command.
    seconds: The time limit that the command had.

  Returns:
    The exit code or the limit that ended it, then the last lines of stdout and of
    stderr, about `MAX_OUTPUT_CHARS` in all.
  """
  stdout, stderr = (
    stream.decode('utf-8', 'replace') for stream in (result.stdout, result.stderr)
  )
  # Programs that print much to stderr must not push the tests' summary out.
  stderr = keep_tail(stderr, MAX_OUTPUT_CHARS // 4)
  stdout = keep_tail(stdout, max(MAX_OUTPUT_CHARS - len(stderr), 0))
  return f'{describe_exit(result, seconds)}\n{stdout}{stderr}'
