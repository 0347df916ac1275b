"""Which tests passed, as a test run's report or its words have it."""

import re
from collections.abc import Sequence
from xml.etree import ElementTree

_PYTEST = re.compile(
  r'^(?:(PASSED) (\S.*)|(FAILED|ERROR|XFAIL|XPASS|SKIPPED) (\S.*?)(?: - .*)?)$'
)
_UNITTEST = re.compile(
  r'^(test\w* \([\w.]+\))(?:.*?) \.\.\. (ok|FAIL|ERROR|expected failure|skipped.*)$'
)
# unittest names a test that has a docstring by its first line, on a line of its own.
_DESCRIBED = re.compile(
  r'^(\S.*?) \.\.\. +(ok|OK|FAIL|ERROR|expected failure|skipped.*)$'
)
_SYMPY = re.compile(r'^(test\w*) (ok|F|E|f|s)\b')
_GOOD = ('PASSED', 'XFAIL', 'ok', 'OK', 'expected failure', 'f')


def from_report(report: bytes, tests: Sequence[str] = ()) -> dict[str, bool]:
  """Test ids, as pytest writes them, and whether each passed, of a JUnit XML report.

  The report has been written beside code that nobody trusts: a garbled one has no
  tests. A test reported several times has passed if it has each time. tests: ids that
  are looked for; a test inherited from another file is only known by them.
  """
  if b'<!' in report.replace(b'<![CDATA[', b''):
    return {}  # pytest declares no entities
  try:
    cases = list(ElementTree.fromstring(report).iter('testcase'))
  except ElementTree.ParseError:
    return {}
  passed: dict[str, bool] = {}
  known = {_address(test): test for test in tests}
  for case in cases:
    address = case.get('classname', ''), case.get('name', '')
    name = known.get(address) or _id(case)
    passed[name] = passed.get(name, True) and all(map(_harmless, case))
  return passed


def _address(test: str) -> tuple[str, str]:
  """`classname` and `name` of a test id, as pytest makes them."""
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


def _harmless(part: ElementTree.Element) -> bool:
  if part.tag == 'skipped':
    return part.get('type') == 'pytest.xfail'  # it failed as it should
  return part.tag not in ('failure', 'error')


def from_log(text: str) -> dict[str, bool]:
  """Test ids and whether each passed, of what a test run said.

  Lines of `pytest -rA`, of unittest with `-v` (and Django), or of SymPy's `bin/test
  --verbose`. A test that is named several times has passed if it has each time.
  """
  passed: dict[str, bool] = {}
  for line in text.splitlines():
    line = line.rstrip()
    found = _PYTEST.match(line)
    if found:
      verdict, name = filter(None, found.groups())
    else:
      found = _UNITTEST.match(line) or _DESCRIBED.match(line) or _SYMPY.match(line)
      if not found:
        continue
      name, verdict = found.groups()
    passed[name] = passed.get(name, True) and verdict in _GOOD
  return passed


def pytest_summary(text: str) -> dict[str, bool]:
  """`from_log` of pytest's summary alone: what tests print comes before it.

  More than one counts as one, so that nothing said later hides a failure.
  """
  return from_log(text.partition('short test summary info')[2])
