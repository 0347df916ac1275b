"""The model writes a Python program; hidden tests run it in a sandbox; one turn."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jaxrl.envs.code_runner import CodeRunner, last_block
from jaxrl.envs.code_tests import Case, read_cases


class CodeEnv:
  """Asks for a program and rewards the share of hidden tests that it passes.

  The program is the last closed ``` block of the reply. The task's `question` is
  shown; its `answer` holds the tests (`code_tests.read_cases` says how they are
  written), which the program never sees.

  reward: for a program that passes all. all_or_nothing: no reward below that.
  seconds: wall clock and CPU of one test; total_seconds: of all of them, those not
  reached are failed. memory_mb, processes: of a program and all that it starts.
  output_mb: of one test. unsafe: run also where the kernel allows no sandbox, with
  all that the program can then do to this machine. SandboxError without it.
  """

  columns: ClassVar = {'given': 'string', 'verdicts': 'string'}

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
    self._reward, self._all_or_nothing = reward, all_or_nothing
    self._runner = CodeRunner(
      seconds=seconds,
      total_seconds=total_seconds,
      memory_mb=memory_mb,
      processes=processes,
      output_mb=output_mb,
      unsafe=unsafe,
    )
    self._cases: list[Case] = []

  def reset(
    self, *, seed: int, options: Mapping[str, Any] | None = None
  ) -> tuple[str | None, dict[str, Any]]:
    task = (options or {}).get('task')
    if task is None or task.item is None:
      raise ValueError('the code environment needs a dataset: its tasks are problems')
    self._cases = read_cases(task.item['answer'])
    return str(task.item['question']), {}

  def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    program = last_block(action)
    verdicts = ['no code'] * len(self._cases)
    if program:
      verdicts = self._runner.verdicts(program, self._cases)
    share = verdicts.count('passed') / len(verdicts)
    solved = float(share == 1)
    reward = self._reward * (solved if self._all_or_nothing else share)
    metrics = {'passed': share, 'accuracy': solved, 'correct': solved}
    metrics['marked'] = float(bool(program))
    metrics['timeout'] = verdicts.count('time') / len(verdicts)
    columns = {'given': program, 'verdicts': ', '.join(verdicts)}
    return '', reward, True, False, {'metrics': metrics, 'columns': columns}
