"""CodeEnv asks for a Python program, which hidden tests judge in a sandbox."""

import json
import re
from collections.abc import Sequence
from typing import ClassVar

from jaxrl.envs.coding.code_runner import CaseResult, CodeRunner
from jaxrl.envs.coding.hidden_tests import (
  HiddenTest,
  called_function,
  read_hidden_tests,
)
from jaxrl.envs.env_registry import Info, ResetOptions
from jaxrl.envs.reply_parsing import find_program, last_code_block
from jaxrl.envs.sandbox.sandbox_api import keep_tail

MAX_TEXT_CHARS = 1000  # kept of each text of a failed test


class CodeEnv:
  """Asks for a program and rewards the share of hidden tests that it passes.

  The program is the block of the reply that defines what the tests call, or else its
  longest Python block; see `reply_parsing.find_program`. The task's `question` is
  shown.
  Its `answer` holds the tests (`hidden_tests.read_hidden_tests` describes their form),
  which the program never sees. The first is shown if tests are texts with `assert`, as
  in MBPP, and the question does not name the function that they call.

  Args:
    reward: The reward of a program that passes all tests.
    all_or_nothing: Whether a program that fails a test gets no reward at all.
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

  columns: ClassVar = {
    'given': 'string',
    'verdicts': 'string',
    'test_output': 'string',
  }
  empty_reply: ClassVar = '```python\npass\n```'

  def __init__(
    self,
    *,
    reward: float = 1.0,
    all_or_nothing: bool = False,
    seconds: float = 4.0,
    total_seconds: float = 30.0,
    memory_mb: int = 256,
    processes: int = 16,
    output_mb: int = 1,
    unsafe: bool = False,
  ):
    self._reward = reward
    self._all_or_nothing = all_or_nothing
    self._runner = CodeRunner(
      seconds=seconds,
      total_seconds=total_seconds,
      memory_mb=memory_mb,
      processes=processes,
      output_mb=output_mb,
      unsafe=unsafe,
    )
    self._cases: list[HiddenTest] = []
    self._solution: str | None = None

  def reset(
    self, *, seed: int, options: ResetOptions | None = None
  ) -> tuple[str | None, Info]:
    """Returns the task's question."""
    task = (options or {}).get('task')
    if task is None or task.item is None:
      raise ValueError(
        'the code environment needs a data set of problems: set dataset.path'
      )
    self._cases = read_hidden_tests(task.item['answer'], task.item)
    self._solution = task.item.get('solution')
    question, shown = str(task.item['question']), self._cases[0].shown
    if shown and called_function(self._cases) not in question:
      question = f'{question}\n\nYour code should pass tests such as this one:\n{shown}'
    return question, {}

  def apply_solution(self) -> str | None:
    """Returns a reply with the program that the task holds as its `solution`.

    Raises:
      ValueError: If a reply cannot hold the program.
    """
    if self._solution is None:
      return None
    program = last_code_block(str(self._solution)) or f'{self._solution}\n'
    ticks = max(map(len, re.findall('`+', program)), default=0)
    fence = '`' * max(3, ticks + 1)
    line_end = '' if program.endswith('\n') else '\n'
    reply = f'{fence}python\n{program}{line_end}{fence}'
    if find_program(reply, called_function(self._cases)).strip() != program.strip():
      raise ValueError('the solution cannot be put into a block of a reply')
    return reply

  def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
    """Tests the reply's program and ends the episode."""
    program = find_program(action, called_function(self._cases))
    results = [CaseResult('no code')] * len(self._cases)
    if program:
      results = self._runner.run(program, self._cases)
    verdicts = [result.verdict for result in results]
    share = verdicts.count('passed') / len(verdicts)
    solved = float(share == 1)
    reward = self._reward * (solved if self._all_or_nothing else share)
    metrics = {'passed': share, 'accuracy': solved, 'correct': solved}
    metrics['marked'] = float(bool(program))
    metrics['timeout'] = verdicts.count('time') / len(verdicts)
    columns = {'given': program, 'verdicts': ', '.join(verdicts)}
    columns['test_output'] = _describe_first_failure(self._cases, results)
    return '', reward, True, False, {'metrics': metrics, 'columns': columns}


def _describe_first_failure(
  cases: Sequence[HiddenTest], results: Sequence[CaseResult]
) -> str:
  """Describes the first test that failed; returns '' if none did."""
  for number, (case, result) in enumerate(zip(cases, results, strict=True)):
    if result.verdict != 'passed':
      is_call = 'input' not in case.request
      texts = {
        'input': json.dumps(case.request) if is_call else case.request['input'],
        'expected': json.dumps(case.accepted[0]) if is_call else case.accepted[0],
        'output': result.output,
        'stderr': result.stderr,
      }
      lines = [f'test {number} of {len(cases)}: {result.verdict}']
      for name, text in texts.items():
        lines.append(f'{name}:\n{keep_tail(text, MAX_TEXT_CHARS)}')
      return '\n'.join(lines)
  return ''
