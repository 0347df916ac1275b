"""The code grader: the reply's program, judged by the item's hidden tests."""

from jaxrl.envs.code_runner import CodeRunner, last_block
from jaxrl.envs.code_tests import read_cases
from jaxrl.envs.graders.rules import Item, Part
from jaxrl.envs.sandbox.base import SandboxError
from jaxrl.signature import ConfigError


def code(
  *,
  tests: str = 'answer',
  all_or_nothing: bool = False,
  seconds: float = 4.0,
  total_seconds: float = 30.0,
  memory_mb: int = 256,
  unsafe: bool = False,
) -> Part:
  """The share of hidden tests that the last closed ``` block of the reply passes.

  tests: which of the item's fields holds them, as `code_tests.read_cases` has them.
  all_or_nothing: 0 for less than all. seconds, total_seconds: of a test, and of all of
  them; memory_mb: of the program. unsafe: run also where the kernel allows no
  sandbox; ConfigError without it.
  """
  try:
    runner = CodeRunner(
      seconds=seconds, total_seconds=total_seconds, memory_mb=memory_mb, unsafe=unsafe
    )
  except SandboxError as error:
    raise ConfigError(f"grader 'code': {error}") from error

  def grade(reply: str, item: Item) -> float:
    if item.get(tests) is None:
      raise ValueError(f"grader 'code': the task has no tests in its field {tests!r}")
    cases = read_cases(item[tests])
    program = last_block(reply)
    passed = runner.verdicts(program, cases).count('passed') if program else 0
    return float(passed == len(cases)) if all_or_nothing else passed / len(cases)

  return grade
