"""An agent does a task in a shell; the task's own tests judge what it leaves.

Tasks are folders as Terminal-Bench has them (`terminal_tasks`). Tests are put into the
sandbox after the agent's last command, when nothing that it started is alive.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from jaxrl.envs import dockerfile, outcomes, terminal_tasks
from jaxrl.envs import shell as shells
from jaxrl.envs.sandbox import places
from jaxrl.envs.sandbox.backends import backend
from jaxrl.envs.sandbox.base import Result, Sandbox, SandboxError
from jaxrl.signature import ConfigError

# What shells say of a program that is nowhere on the PATH.
_ABSENT = re.compile(r'(^|[\s:])[^\s:/]+: (command )?not found$', re.MULTILINE)


class TerminalBenchEnv:
  """One task of a data set a time: its `question` names a folder below `tasks`.

  tasks: the folder of tasks. sandbox: `docker(image='…{task}')` or `podman(…)`, whose
  image was built from the task's Dockerfile; or `local(…)`, with this machine's
  programs: there the Dockerfile's COPY, ENV, WORKDIR and RUN are done at each reset,
  RUN without network. build: 'copy' leaves RUN out, for tasks whose RUN installs what
  this machine has. shell: see `shell.Shell`. test_command: in place of the task's own
  script, such as 'pytest -rA /tests/test_outputs.py' where that one would fetch pytest
  from the net. time_factor: of the task's own time limits. setup_seconds: of each RUN.

  reward: 1 when all tests pass, else 0; for tasks of the second form what their tests
  write, within 0 and 1.
  """

  columns: ClassVar = {'failed': 'string', 'task': 'string'}

  def __init__(
    self,
    *,
    tasks: str = '',
    sandbox: str = 'local',
    shell: str = 'shell',
    build: Literal['run', 'copy'] = 'run',
    test_command: str = '',
    time_factor: float = 1.0,
    setup_seconds: float = 600.0,
  ):
    self.check(tasks=tasks, sandbox=sandbox, shell=shell)
    self._tasks, self._make = Path(tasks).expanduser(), backend(sandbox)
    self._local = sandbox.startswith('local')
    self._shell, self._build = shells.make(shell), build
    self._test_command, self._factor = test_command, time_factor
    self._setup_seconds = setup_seconds
    self._task: terminal_tasks.TerminalTask | None = None
    self._sandbox: Sandbox | None = None

  @staticmethod
  def check(
    *, tasks: str = '', sandbox: str = 'local', shell: str = 'shell', **others: Any
  ) -> None:
    """Raises ConfigError for what cannot work."""
    del others  # their types tell
    if not tasks or not os.path.isdir(os.path.expanduser(tasks)):
      raise ConfigError(
        f'terminal_bench: option tasks={tasks!r} has to name a folder of tasks'
      )
    terminal_tasks.check()
    backend(sandbox)
    shells.make(shell)

  def reset(
    self, *, seed: int, options: Mapping[str, Any] | None = None
  ) -> tuple[str | None, dict[str, Any]]:
    self.kill()
    task = (options or {}).get('task')
    if task is None or task.item is None:
      raise ValueError('terminal_bench needs a dataset: rows that name tasks')
    folder = self._tasks / str(task.item['question'])
    self._task = terminal_tasks.read_task(folder)
    with places.scratch() as scratch:
      files = scratch / 'files'
      files.mkdir()
      sandbox = self._open(files)
    self._shell.start(sandbox, self._factor * self._task.agent_seconds)
    return f'{self._task.instruction}\n\n{shells.HELP}', {}

  def _open(self, scratch: Path) -> Sandbox:
    """The task's sandbox; without a container what its Dockerfile says is done here."""
    assert self._task is not None
    if not self._local:
      made = dockerfile.Staged(workdir='')  # its image has it all
    else:
      made = dockerfile.stage(self._task.context, scratch)
    self._sandbox = sandbox = self._make(
      folders=made.folders,
      workdir=made.workdir,
      task=self._task.name,
      environment=made.environment,
    )
    sandbox.start()
    if self._local and sandbox.exec(['pwd']).text.strip() != made.workdir:
      raise SandboxError(
        "tasks of terminal_bench name paths from the root, which unsafe=True can't "
        'give: use docker or podman where there are no namespaces'
      )
    for workdir, command in made.commands if self._build == 'run' else ():
      script = f'mkdir -p "$0" && cd "$0" && {command}'
      argv = ['sh', '-c', script, workdir]
      result = sandbox.exec(argv, seconds=self._setup_seconds)
      if result.code:
        raise SandboxError(
          f'{self._task.name}: RUN {command[:200]} ended with {result.code}: '
          f"{result.text[-500:]} (build='copy' leaves RUN out; docker needs none of it)"
        )
    return sandbox

  def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    return shells.step(self._shell, action, self._grade, self.kill)

  def _grade(self) -> tuple[float, dict[str, Any]]:
    task, sandbox = self._task, self._sandbox
    assert task is not None
    if sandbox is None:
      raise SandboxError('the sandbox was stopped')
    with places.scratch() as scratch:
      task.stage_tests(scratch / 'tests')
      sandbox.put(terminal_tasks.TESTS, f'{scratch}/tests')
    if task.writes_reward:
      sandbox.put(terminal_tasks.REWARDS, None)
    command = self._test_command or f'bash {terminal_tasks.TESTS}/{task.script}'
    variables = (f'TEST_DIR={terminal_tasks.TESTS}', 'PYTHONDONTWRITEBYTECODE=1')
    argv = ['env', *variables, 'sh', '-c', command]
    result = sandbox.exec(argv, seconds=self._factor * task.test_seconds)
    late = float(result.limit == 'time')
    if self._local and _lacks(result):  # its programs are out of the agent's reach
      raise SandboxError(
        f'{task.name}: {command} calls for a program that is not here: '
        f'{result.text[-500:]} (another test_command may do without)'
      )
    if task.writes_reward:
      reward = 0.0 if result.limit else self._written(sandbox)
      shares = {'passed': reward, 'test_timeout': late}
      return reward, {'metrics': shares, 'columns': {'failed': '', 'task': task.name}}
    passed = outcomes.pytest_summary(result.stdout.decode('utf-8', 'replace'))
    failed = [name for name, fine in passed.items() if not fine]
    solved = bool(passed) and not failed and result.code == 0
    share = (len(passed) - len(failed)) / len(passed) if passed else 0.0
    columns = {'failed': '\n'.join(failed), 'task': task.name}
    return float(solved), {
      'metrics': {'passed': share, 'test_timeout': late},
      'columns': columns,
    }

  def _written(self, sandbox: Sandbox) -> float:
    """The reward that the tests left: a number, or JSON with a `reward`; else 0."""
    for name in ('reward.txt', 'reward.json'):
      path = f'{terminal_tasks.REWARDS}/{name}'
      text = sandbox.exec(['cat', '--', path], output=1 << 16).stdout
      try:
        said = json.loads(text)
        reward = float(said['reward'] if isinstance(said, dict) else said)
      except (ValueError, RecursionError, KeyError, TypeError):
        continue
      return min(max(reward, 0.0), 1.0) if math.isfinite(reward) else 0.0
    return 0.0

  def kill(self) -> None:
    """Ends what runs and removes what lies there; from any thread."""
    sandbox, self._sandbox = self._sandbox, None
    if sandbox is not None:
      sandbox.stop()

  close = kill


def _lacks(result: Result) -> bool:
  """Whether a program of the machine's was missing, not one that the agent owed."""
  if result.code != 127 or 'test session starts' in result.text:
    return False
  return _ABSENT.search(result.text) is not None
