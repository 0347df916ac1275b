"""The code grader judges a reply's program by the item's hidden tests."""

from jaxrl.call_strings import ConfigError
from jaxrl.envs.coding.code_runner import CodeRunner
from jaxrl.envs.coding.hidden_tests import read_hidden_tests
from jaxrl.envs.graders.rule_graders import GraderPart, TaskItem
from jaxrl.envs.reply_parsing import last_code_block
from jaxrl.envs.sandbox.sandbox_api import SandboxError


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
  try:
    runner = CodeRunner(
      seconds=seconds, total_seconds=total_seconds, memory_mb=memory_mb, unsafe=unsafe
    )
  except SandboxError as error:
    raise ConfigError(f"grader 'code': {error}") from error

  def grade(reply: str, item: TaskItem) -> float:
    if item.get(tests) is None:
      raise ValueError(f"grader 'code': the task has no tests in its field {tests!r}")
    cases = read_hidden_tests(item[tests])
    program = last_code_block(reply)
    passed = runner.verdicts(program, cases).count('passed') if program else 0
    return float(passed == len(cases)) if all_or_nothing else passed / len(cases)

  return grade
