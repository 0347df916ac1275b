"""Code graders judge a reply's program by its item's hidden tests or test code."""

import re
import textwrap
from typing import Any

from jaxrl.envs.coding.code_runner import CodeRunner
from jaxrl.envs.coding.hidden_tests import (
  HiddenTest,
  called_function,
  read_hidden_tests,
)
from jaxrl.envs.graders.rule_graders import GraderPart, TaskItem
from jaxrl.envs.reply_parsing import (
  code_blocks,
  defines,
  find_program,
  parse_python,
  without_thought,
)
from jaxrl.envs.sandbox.sandbox_api import SandboxError
from jaxrl.options import POSITIVE, option_ranges

_CHECK = 'run_test_code'
# HumanEval's stop words, and the fence that a prompt may have opened.
_FUNCTION_END = re.compile(r'(?<=\n)(?:class|def|async|#|if|print|@|```|<|[A-Z])')


@option_ranges(seconds=POSITIVE, total_seconds=POSITIVE, memory_mb=POSITIVE)
def make_code_grader(
  *,
  tests: str = 'answer',
  all_or_nothing: bool = False,
  seconds: float = 4.0,
  total_seconds: float = 30.0,
  memory_mb: int = 256,
  unsafe: bool = False,
) -> GraderPart:
  """Builds a grader that scores the share of hidden tests that a program passes.

  The program is the block of the reply that defines what the tests call, or else its
  longest Python block; see `reply_parsing.find_program`.

  Args:
    tests: The field of the item that holds the tests; see
      `hidden_tests.read_hidden_tests`.
    all_or_nothing: Whether a program that fails a test scores 0.
    seconds: The time limit of a test.
    total_seconds: The time limit of all tests.
    memory_mb: The memory of the program.
    unsafe: Also run where the kernel allows no sandbox.

  Returns:
    The grader.

  Raises:
    ValueError: If there is no sandbox and `unsafe` is not set.
  """
  runner = _make_runner(
    'code',
    seconds=seconds,
    total_seconds=total_seconds,
    memory_mb=memory_mb,
    unsafe=unsafe,
  )

  def grade(reply: str, item: TaskItem) -> float:
    if item.get(tests) is None:
      raise ValueError(f"grader 'code': the task has no tests in its field {tests!r}")
    cases = read_hidden_tests(item[tests], item)
    program = find_program(reply, called_function(cases))
    passed = runner.verdicts(program, cases).count('passed') if program else 0
    return float(passed == len(cases)) if all_or_nothing else passed / len(cases)

  return grade


@option_ranges(seconds=POSITIVE, memory_mb=POSITIVE)
def make_humaneval_grader(
  *, seconds: float = 4.0, memory_mb: int = 512, unsafe: bool = False
) -> GraderPart:
  """Builds a grader that scores 1 if a program passes the item's test code, else 0.

  The item has the fields of HumanEval (Chen et al. 2021, arXiv:2107.03374): `prompt`,
  the beginning of a program, `test`, which defines `check(candidate)`, and
  `entry_point`, the function to check. The program is the block of the reply that
  defines this function, or else its longest Python block, or else the whole reply. It
  may be all of the program, or the rest of what the prompt begins.

  Args:
    seconds: The time limit of the program with its tests.
    memory_mb: The memory of the program.
    unsafe: Also run where the kernel allows no sandbox.

  Returns:
    The grader.

  Raises:
    ValueError: If there is no sandbox and `unsafe` is not set.
  """
  runner = _make_runner(
    'humaneval', seconds=seconds, memory_mb=memory_mb, unsafe=unsafe
  )
  case = HiddenTest({'function': _CHECK, 'args': []}, (True,))

  def grade(reply: str, item: TaskItem) -> float:
    for field in ('prompt', 'test', 'entry_point'):
      if not isinstance(item.get(field), str):
        raise ValueError(
          f"grader 'humaneval': the task has no text in its field {field!r}"
        )
    name = item['entry_point']
    program = _completed(
      reply, item['prompt'], re.sub(r'\W+$', '', name).split('.')[-1]
    )
    check = f'\n\ndef {_CHECK}():\n    check({name})\n    return True\n'
    program = f'{program}\n\n{item["test"]}{check}'
    return float(runner.verdicts(program, [case]) == ['passed'])

  return grade


def _completed(reply: str, prompt: str, function: str) -> str:
  """Returns the program that a reply makes of a prompt."""
  reply = without_thought(reply)
  code = find_program(reply, function)
  blocks = [block for block in code_blocks(reply) if block.closed or block.is_python]
  if not blocks and not defines(code, function):
    code = reply  # what a model continues the prompt with
  if defines(code, function):
    return f'{prompt}\n    pass\n\n{code}'  # ends the function, which is defined anew
  if _compiles(f'{prompt}{code}'):
    return f'{prompt}{code}'
  for body in (code, textwrap.indent(textwrap.dedent(code), '    ')):
    rest = _FUNCTION_END.search(body)  # a model may go on after the function
    program = f'{prompt}{body[: rest.start()] if rest else body}'
    if _compiles(program):
      return program
  return f'{prompt}{code}'


def _compiles(program: str) -> bool:
  """Returns whether a program is complete; a return outside a function is not."""
  tree = parse_python(program)
  try:
    return tree is not None and bool(compile(tree, 'solution.py', 'exec'))
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return False


def _make_runner(grader: str, **options: Any) -> CodeRunner:
  """Builds a runner; without a sandbox, the error names the grader."""
  try:
    return CodeRunner(**options)
  except SandboxError as error:
    raise ValueError(f'grader {grader!r}: {error}') from error
