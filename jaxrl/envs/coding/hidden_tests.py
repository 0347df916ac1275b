"""Hidden tests of programs: how tasks store them, and when an output is right."""

import ast
import builtins
import contextlib
import dataclasses
import json
import math
import re
import types
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from jaxrl.envs.graders.rule_graders import TaskItem
from jaxrl.options import JsonObject

_TOLERANCE = 1e-6  # how far apart two decimal numbers may be, relative or absolute
_ASSERT = re.compile(r'^\s*assert\b', re.MULTILINE)
_DECIMAL = re.compile(r'[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?')


@dataclasses.dataclass(frozen=True)
class HiddenTest:
  """One test of a program.

  Attributes:
    request: What the program is given: `{'input': text}`, `{'function': name, 'args':
      list}`, or `{'statements': text}`, which run after it and raise if it is wrong;
      with `testtype`, the program gets the imports of LiveCodeBench.
    accepted: The answers that pass: texts, or JSON values.
    function: The function that the test calls; '' if it runs the program.
    shown: What a program's author may see of the test; '' if nothing.
  """

  request: JsonObject
  accepted: tuple[Any, ...]
  function: str = ''
  shown: str = ''

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


def read_hidden_tests(
  tests: object, item: TaskItem = types.MappingProxyType({})
) -> list[HiddenTest]:
  """Parses the tests from a task's data.

  The data is a list of `{'input': text, 'output': text}` and `{'function': name,
  'args': [...], 'result': value}`; or, as in APPS and TACO, `{'inputs': [...],
  'outputs': [...]}`, with `fn_name` for calls, where a result may be wrapped in a list
  of its own. Lines may be given as a list of texts.

  As in MBPP, tests may be texts with Python's `assert`. They run after the row's
  `test_imports` and `test_setup_code`.

  In LiveCodeBench's form, a test has a `testtype`: `stdin`, or `functional` for a call
  whose input is a text with one JSON value per line. The function is named by the test
  or the data (`fn_name`, `func_name`), or by the row's `fn_name`, `func_name`,
  `entry_point`, `metadata` or `starter_code`.

  Args:
    tests: The data, or its JSON text.
    item: The row, which may name the function.

  Returns:
    The tests.

  Raises:
    ValueError: If the data has another form or holds no tests.
  """
  if isinstance(tests, str):
    try:
      tests = [tests] if _ASSERT.search(tests) else json.loads(tests)
    except ValueError as error:
      raise ValueError(f'the tests {tests[:40]!r} are no JSON: {error}') from error
  if isinstance(tests, dict) and isinstance(tests.get('test_cases'), list):
    item, tests = {**item, **tests}, tests['test_cases']
  if isinstance(tests, dict):
    cases = _parse_columns(tests, item)
  elif isinstance(tests, list):
    cases = [_parse_test(number, test, item) for number, test in enumerate(tests)]
  else:
    raise ValueError(f'tests are a {type(tests).__name__}; give a list or an object')
  if not cases:
    raise ValueError('the task has no tests')
  return cases


def called_function(cases: Sequence[HiddenTest]) -> str:
  """Returns the name of the function that tests call; '' if they run the program.

  Args:
    cases: The tests.
  """
  return next((case.function for case in cases if case.function), '')


def _parse_test(number: int, test: Any, item: TaskItem) -> HiddenTest:
  if isinstance(test, str):
    return _assertion(number, test, item)
  keys = set(test) if isinstance(test, dict) else set()
  if {'function', 'args', 'result'} <= keys:
    request = {'function': str(test['function']), 'args': list(test['args'])}
    return HiddenTest(request, (test['result'],), request['function'])
  if not {'input', 'output'} <= keys:
    raise ValueError(
      f'test {number} has {sorted(map(str, keys)) or test!r}; it needs input and '
      'output, or function, args and result'
    )
  kind = test.get('testtype')
  name = _function_name(test)
  if kind not in (None, '', 'stdin', 'functional'):
    raise ValueError(f'test {number} has testtype {kind!r}; use stdin or functional')
  if kind != 'functional' and not name:
    request = {'input': _text(test['input'])}
    if kind:
      request['testtype'] = kind
    return HiddenTest(request, (_text(test['output']),))
  name = name or _function_name(item)
  if not name:
    raise ValueError(
      f'test {number} is functional, but neither it nor its row names the function: '
      "give it as fn_name, or as func_name in the row's metadata"
    )
  return _call_test(number, name, test['input'], test['output'])


def _parse_columns(tests: JsonObject, item: TaskItem) -> list[HiddenTest]:
  inputs, outputs = tests.get('inputs'), tests.get('outputs')
  if not isinstance(inputs, list) or not isinstance(outputs, list):
    raise ValueError(f'tests have {sorted(tests)}; they need lists inputs and outputs')
  if len(inputs) != len(outputs):
    raise ValueError(f'tests have {len(inputs)} inputs but {len(outputs)} outputs')
  kind = tests.get('testtype')
  pairs = enumerate(zip(inputs, outputs, strict=True))
  if not _function_name(tests):
    return [
      _parse_test(number, {'input': one, 'output': other, 'testtype': kind}, item)
      for number, (one, other) in pairs
    ]
  name = _function_name(tests)
  return [_call_test(number, name, one, other) for number, (one, other) in pairs]


def _function_name(source: TaskItem) -> str:
  """Returns the function that a test, its data or a row names, or ''."""
  for key in ('fn_name', 'func_name', 'entry_point'):
    if isinstance(source.get(key), str) and source[key]:
      return re.sub(r'\W+$', '', source[key]).rpartition('.')[2]
  metadata = source.get('metadata')
  if isinstance(metadata, str):
    with contextlib.suppress(ValueError):
      metadata = json.loads(metadata)
  if isinstance(metadata, Mapping) and (name := _function_name(metadata)):
    return name
  names = re.findall(
    r'^\s*def\s+(?!__)(\w+)', str(source.get('starter_code') or ''), re.M
  )
  return names[-1] if len(names) == 1 else ''


def _call_test(number: int, name: str, arguments: object, result: Any) -> HiddenTest:
  """Returns a test that calls a function.

  Args:
    number: The number of the test.
    name: The name of the function.
    arguments: A list of values, or their text.
    result: The result, or its text if the arguments are a text.
  """
  if isinstance(arguments, str):
    values = _text_arguments(number, arguments)
    results = [result]
    if isinstance(result, str):
      results = [_read_value(f'test {number}: its output', result)]
    return HiddenTest({'function': name, 'args': values}, tuple(results), name)
  if not isinstance(arguments, list | tuple):
    raise ValueError(
      f'test {number} of {name}: its input is {arguments!r:.60}; give the arguments as '
      'a list, or as a text with one JSON value per line'
    )
  is_wrapped = isinstance(result, list) and len(result) == 1
  accepted = (result, result[0]) if is_wrapped else (result,)
  return HiddenTest({'function': name, 'args': list(arguments)}, accepted, name)


def _assertion(number: int, test: str, item: TaskItem) -> HiddenTest:
  """Returns a test of Python's `assert` statements, as MBPP has them."""
  imports, setup = item.get('test_imports') or (), item.get('test_setup_code') or ''
  before = [imports] if isinstance(imports, str) else list(imports)
  statements = '\n'.join([*before, setup, test])
  try:
    body, whole = ast.parse(test), ast.parse(statements)
  except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
    raise ValueError(
      f'test {number}, {test!r:.60}, is a text that is no Python: {error}; it needs '
      'assert statements, or input and output'
    ) from error
  if not any(isinstance(node, ast.Assert) for node in ast.walk(body)):
    raise ValueError(f'test {number}, {test!r:.60}, is Python without any assert')
  known = {*dir(builtins), *_assigned_names(whole)}
  names = [
    node.func.id
    for node in ast.walk(body)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
  ]
  function = next((name for name in names if name not in known), '')
  return HiddenTest({'statements': statements}, (True,), function, test)


def _assigned_names(tree: ast.AST) -> set[str]:
  """Returns the names that statements define or import."""
  names = {
    node.id
    for node in ast.walk(tree)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
  }
  for node in ast.walk(tree):
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      names.add(node.name)
    elif isinstance(node, ast.Import | ast.ImportFrom):
      names |= {(one.asname or one.name).partition('.')[0] for one in node.names}
  return names


def _text_arguments(number: int, text: str) -> list[Any]:
  """Parses arguments: a value per line, or `nums = [2, 7], target = 9`."""
  if re.match(r'\s*[A-Za-z_]\w*\s*=[^=]', text):
    with contextlib.suppress(SyntaxError, ValueError):
      call = ast.parse(f'f({" ".join(text.split())})', mode='eval').body
      if isinstance(call, ast.Call) and not call.args:
        return [ast.literal_eval(keyword.value) for keyword in call.keywords]
  where = f'test {number}: its input'
  lines = text.strip('\n').split('\n')
  with contextlib.suppress(ValueError):
    return (
      [json.loads('\n'.join(lines))]
      if len(lines) > 1
      else [_read_value(where, lines[0])]
    )
  return [_read_value(where, line) for line in lines]


def _read_value(where: str, text: str) -> Any:
  """Reads a JSON value, a Python literal, or a text without quotes."""
  try:
    return json.loads(text)
  except ValueError:
    pass
  try:
    value = ast.literal_eval(text.strip())
    return json.loads(json.dumps(value))  # as tuples and sets of a program become
  except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
    if re.match(r'\s*[\[({"\'\d-]', text):
      raise ValueError(
        f'{where} {text!r:.60} is neither JSON nor a Python literal'
      ) from error
  return text


def _text(value: object) -> str:
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
  if max(len(word), len(expected)) > 64 or '.' not in word + expected:
    return False
  if not (_DECIMAL.fullmatch(word) and _DECIMAL.fullmatch(expected)):
    return False  # float would take more: 1_0.5, ４.2
  if '.' not in expected:
    return Decimal(word) == Decimal(expected)
  return _nearly_equal(float(word), float(expected))


def values_match(result: object, expected: object) -> bool:
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


def _is_number(value: object) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool)


def _nearly_equal(one: Any, other: Any) -> bool:
  try:
    return math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
  except OverflowError:  # an integer beyond all floats
    return False
