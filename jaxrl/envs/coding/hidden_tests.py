"""Hidden tests of programs: how tasks store them, and when an output is right."""

import dataclasses
import json
import math
from typing import Any

_TOLERANCE = 1e-6  # how far apart two decimal numbers may be, relative or absolute


@dataclasses.dataclass(frozen=True)
class HiddenTest:
  """One test of a program.

  Attributes:
    request: What the program is given: `{'input': text}` or `{'function': name, 'args':
      list}`.
    accepted: The answers that pass: texts, or JSON values.
  """

  request: dict[str, Any]
  accepted: tuple[Any, ...]

  def passed(self, output: str) -> bool:
    """Returns whether the program's output, or its result as JSON, is right.

    Args:
      output: The output or result.

    Returns:
      True if the test is passed.
    """
    if 'input' in self.request:
      return any(outputs_match(output, expected) for expected in self.accepted)
    try:
      result = json.loads(output)
    except (ValueError, RecursionError):
      return False
    return any(values_match(result, expected) for expected in self.accepted)


def read_hidden_tests(tests: Any) -> list[HiddenTest]:
  """Parses the tests from a task's data.

  The data is a list of `{'input': text, 'output': text}` and `{'function': name,
  'args': [...], 'result': value}`; or, as in APPS and TACO, `{'inputs': [...],
  'outputs': [...]}`, with `fn_name` for calls, where a result may be wrapped in a list
  of its own. Lines may be given as a list of texts.

  Args:
    tests: The data, or its JSON text.

  Returns:
    The tests.

  Raises:
    ValueError: If the data has another form or holds no tests.
  """
  if isinstance(tests, str):
    tests = json.loads(tests)
  if isinstance(tests, dict):
    cases = _parse_columns(tests)
  elif isinstance(tests, list):
    cases = [_parse_test(number, test) for number, test in enumerate(tests)]
  else:
    raise ValueError(f'tests are a {type(tests).__name__}; give a list or an object')
  if not cases:
    raise ValueError('the task has no tests')
  return cases


def _parse_test(number: int, test: Any) -> HiddenTest:
  keys = set(test) if isinstance(test, dict) else set()
  if {'input', 'output'} <= keys:
    return HiddenTest({'input': _text(test['input'])}, (_text(test['output']),))
  if {'function', 'args', 'result'} <= keys:
    request = {'function': str(test['function']), 'args': list(test['args'])}
    return HiddenTest(request, (test['result'],))
  raise ValueError(
    f'test {number} has {sorted(map(str, keys)) or test!r}; it needs input and output, '
    'or function, args and result'
  )


def _parse_columns(tests: dict[str, Any]) -> list[HiddenTest]:
  inputs, outputs = tests.get('inputs'), tests.get('outputs')
  if not isinstance(inputs, list) or not isinstance(outputs, list):
    raise ValueError(f'tests have {sorted(tests)}; they need lists inputs and outputs')
  if len(inputs) != len(outputs):
    raise ValueError(f'tests have {len(inputs)} inputs but {len(outputs)} outputs')
  name = tests.get('fn_name')
  if not name:
    pairs = zip(inputs, outputs, strict=True)
    return [HiddenTest({'input': _text(one)}, (_text(other),)) for one, other in pairs]
  cases = []
  for arguments, result in zip(inputs, outputs, strict=True):
    is_wrapped = isinstance(result, list) and len(result) == 1
    request = {'function': str(name), 'args': list(arguments)}
    cases.append(HiddenTest(request, (result, result[0]) if is_wrapped else (result,)))
  return cases


def _text(value: Any) -> str:
  return '\n'.join(map(str, value)) if isinstance(value, list) else str(value)


def outputs_match(output: str, expected: str) -> bool:
  """Compares two outputs by line, ignoring spaces and small decimal differences.

  Args:
    output: The output of the program.
    expected: The expected output.

  Returns:
    True if they agree.
  """
  output_lines = output.rstrip().splitlines()
  expected_lines = expected.rstrip().splitlines()
  if len(output_lines) != len(expected_lines):
    return False
  return all(map(_same_line, output_lines, expected_lines))


def _same_line(line: str, expected: str) -> bool:
  words, expected_words = line.split(), expected.split()
  return len(words) == len(expected_words) and all(
    map(_same_word, words, expected_words)
  )


def _same_word(word: str, expected: str) -> bool:
  if word == expected:
    return True
  if '.' not in expected or max(len(word), len(expected)) > 64:
    return False
  if '_' in word or not word.isascii():  # float would take them: 1_0.5, ４.2
    return False
  try:
    return _nearly_equal(float(word), float(expected))
  except ValueError:
    return False


def values_match(result: Any, expected: Any) -> bool:
  """Compares two JSON values; numbers with a fraction match approximately.

  Args:
    result: The result of the program.
    expected: The expected result.

  Returns:
    True if they agree.
  """
  if isinstance(expected, list) and isinstance(result, list):
    return len(result) == len(expected) and all(map(values_match, result, expected))
  if isinstance(expected, dict) and isinstance(result, dict):
    same_keys = result.keys() == expected.keys()
    return same_keys and all(
      values_match(result[key], expected[key]) for key in expected
    )
  numbers = _is_number(result) and _is_number(expected)
  if numbers and (isinstance(result, float) or isinstance(expected, float)):
    return _nearly_equal(result, expected)
  return result == expected and (numbers or type(result) is type(expected))


def _is_number(value: Any) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool)


def _nearly_equal(one: Any, other: Any) -> bool:
  try:
    return math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
  except OverflowError:  # an integer beyond all floats
    return False
