"""Code graders judge a reply's program by its item's hidden tests or test code."""

import re
from typing import Any

from jaxrl.call_strings import POSITIVE, ConfigError, option_ranges
from jaxrl.envs.coding.code_runner import CodeRunner
from jaxrl.envs.coding.hidden_tests import HiddenTest, read_hidden_tests
from jaxrl.envs.graders.rule_graders import GraderPart, TaskItem
from jaxrl.envs.reply_parsing import last_code_block
from jaxrl.envs.sandbox.sandbox_api import SandboxError

_CHECK = 'run_test_code'


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

  The program is the last closed ``` block of the reply.

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
    ConfigError: If there is no sandbox and `unsafe` is not set.
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
    cases = read_hidden_tests(item[tests])
    program = last_code_block(reply)
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
  `entry_point`, the function to check. The program is the last closed ``` block of the
  reply, or else the whole reply. It may be all of the program, or the rest of what the
  prompt begins.

  Args:
    seconds: The time limit of the program with its tests.
    memory_mb: The memory of the program.
    unsafe: Also run where the kernel allows no sandbox.

  Returns:
    The grader.

  Raises:
    ConfigError: If there is no sandbox and `unsafe` is not set.
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
    code = last_code_block(reply) or reply
    prompt, name = item['prompt'], item['entry_point']
    if re.search(rf'^\s*(async\s+)?def\s+{re.escape(name)}\b', code, re.MULTILINE):
      prompt += '\n    pass\n\n'  # ends the function that the program defines anew
    check = f'\n\ndef {_CHECK}():\n    check({name})\n    return True\n'
    program = f'{prompt}{code}\n\n{item["test"]}{check}'
    return float(runner.verdicts(program, [case]) == ['passed'])

  return grade


def _make_runner(grader: str, **options: Any) -> CodeRunner:
  """Builds a runner; without a sandbox, the error names the grader."""
  try:
    return CodeRunner(**options)
  except SandboxError as error:
    raise ConfigError(f'grader {grader!r}: {error}') from error
