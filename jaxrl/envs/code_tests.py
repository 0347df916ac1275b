"""Hidden tests of programs: how they are written, and when an answer is right."""

import dataclasses
import json
import math
from typing import Any

_CLOSE = 1e-6  # how far apart two decimal numbers may be, relative or absolute


@dataclasses.dataclass(frozen=True)
class Case:
  """One test. ask: what the program is given, `{'input': text}` or `{'function':
  name, 'args': list}`. right: the answers that pass: texts, or JSON values.
  """

  ask: dict[str, Any]
  right: tuple[Any, ...]

  def passed(self, said: str) -> bool:
    """Whether the program's output, or its result as JSON, is right."""
    if 'input' in self.ask:
      return any(same_output(said, right) for right in self.right)
    try:
      result = json.loads(said)
    except (ValueError, RecursionError):
      return False
    return any(same_value(result, right) for right in self.right)


def read_cases(tests: Any) -> list[Case]:
  """Test cases from a task's data, also when that is JSON text.

  A list of `{'input': text, 'output': text}` and `{'function': name, 'args': [...],
  'result': value}`; or as in APPS and TACO, `{'inputs': [...], 'outputs': [...]}`,
  with `fn_name` for calls, where a result may stand in a list of its own. Lines may
  be given as a list of texts. ValueError for anything else, or no tests at all.
  """
  if isinstance(tests, str):
    tests = json.loads(tests)
  if isinstance(tests, dict):
    cases = _columns(tests)
  elif isinstance(tests, list):
    cases = [_case(number, test) for number, test in enumerate(tests)]
  else:
    raise ValueError(f'tests are a {type(tests).__name__}; give a list or an object')
  if not cases:
    raise ValueError('the task has no tests')
  return cases


def _case(number: int, test: Any) -> Case:
  keys = set(test) if isinstance(test, dict) else set()
  if {'input', 'output'} <= keys:
    return Case({'input': _text(test['input'])}, (_text(test['output']),))
  if {'function', 'args', 'result'} <= keys:
    ask = {'function': str(test['function']), 'args': list(test['args'])}
    return Case(ask, (test['result'],))
  raise ValueError(
    f'test {number} has {sorted(map(str, keys)) or test!r}; it needs input and output, '
    'or function, args and result'
  )


def _columns(tests: dict[str, Any]) -> list[Case]:
  inputs, outputs = tests.get('inputs'), tests.get('outputs')
  if not isinstance(inputs, list) or not isinstance(outputs, list):
    raise ValueError(f'tests have {sorted(tests)}; they need lists inputs and outputs')
  if len(inputs) != len(outputs):
    raise ValueError(f'tests have {len(inputs)} inputs but {len(outputs)} outputs')
  name = tests.get('fn_name')
  if not name:
    pairs = zip(inputs, outputs, strict=True)
    return [Case({'input': _text(one)}, (_text(other),)) for one, other in pairs]
  cases = []
  for given, right in zip(inputs, outputs, strict=True):
    alone = isinstance(right, list) and len(right) == 1
    ask = {'function': str(name), 'args': list(given)}
    cases.append(Case(ask, (right, right[0]) if alone else (right,)))
  return cases


def _text(value: Any) -> str:
  return '\n'.join(map(str, value)) if isinstance(value, list) else str(value)


def same_output(said: str, right: str) -> bool:
  """Whether two outputs agree line by line, whatever the spaces; decimals nearly."""
  ours, theirs = said.rstrip().splitlines(), right.rstrip().splitlines()
  if len(ours) != len(theirs):
    return False
  return all(map(_same_line, ours, theirs))


def _same_line(said: str, right: str) -> bool:
  ours, theirs = said.split(), right.split()
  return len(ours) == len(theirs) and all(map(_same_word, ours, theirs))


def _same_word(said: str, right: str) -> bool:
  if said == right:
    return True
  if '.' not in right or max(len(said), len(right)) > 64:
    return False
  try:
    return _close(float(said), float(right))
  except ValueError:
    return False


def same_value(result: Any, right: Any) -> bool:
  """Whether two JSON values agree; a number with a fraction nearly."""
  if isinstance(right, list) and isinstance(result, list):
    return len(result) == len(right) and all(map(same_value, result, right))
  if isinstance(right, dict) and isinstance(result, dict):
    same_keys = result.keys() == right.keys()
    return same_keys and all(same_value(result[key], right[key]) for key in right)
  numbers = _number(result) and _number(right)
  if numbers and (isinstance(result, float) or isinstance(right, float)):
    return _close(result, right)
  return result == right and (numbers or type(result) is type(right))


def _number(value: Any) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool)


def _close(one: Any, other: Any) -> bool:
  try:
    return math.isclose(one, other, rel_tol=_CLOSE, abs_tol=_CLOSE)
  except OverflowError:  # an integer beyond all floats
    return False
