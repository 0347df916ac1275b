"""TerminalBenchEnv: an agent works in a shell, and the task's tests judge it.

Tasks are folders of Terminal-Bench (`terminal_bench_tasks`). Tests are copied into the
sandbox after the agent's last command, when nothing that it started is alive.
"""

import io
import math
import os
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from jaxrl.component_table import Component, as_call
from jaxrl.envs.env_registry import Info, ResetOptions
from jaxrl.envs.sandbox import workdirs
from jaxrl.envs.sandbox.sandbox_api import ExecResult, Sandbox, SandboxError
from jaxrl.envs.sandbox.sandbox_backends import sandbox_factory
from jaxrl.envs.terminal import (
  dockerfile,
  harbor_artifacts,
  harbor_tasks,
  shell_session,
  terminal_bench_tasks,
  test_results,
)

# The message of shells about a program that is not on the PATH.
_PROGRAM_NOT_FOUND = re.compile(
  r'(^|[\s:])[^\s:/]+: (command )?not found$', re.MULTILINE
)


class TerminalBenchEnv:
  """Plays one task at a time, whose `question` names a folder below `tasks`.

  The reward is 1 if all tests pass, else 0. For tasks of the second form it is what
  their tests write, as Harbor reads it; 0 if that is not a number. A task of several
  steps shows the next one after `submit`; its reward comes at the end.

  Args:
    tasks: The folder of tasks.
    sandbox: `docker(image='…{task}')` or `podman(…)`, whose image was built from the
      task's Dockerfile; or `local(…)`, with this machine's programs: then the
      Dockerfile's COPY, ENV, WORKDIR and RUN are carried out at each reset, RUN without
      network. Where a task's tests have a Dockerfile of their own, `{task}` in the name
      of their image stands for the task's name and `-tests`.
    shell: The options of the shell; see `shell_session.ShellSession`.
    build: 'run' carries out everything; 'copy' leaves RUN out, for tasks whose RUN
      installs what this machine has.
    test_command: Replaces the task's own script, such as 'pytest -rA
      /tests/test_outputs.py' where the script would fetch pytest from the network.
    time_factor: A factor on the task's own time limits.
    setup_seconds: The time limit of each RUN.

  Raises:
    ValueError: If an option cannot work.
  """

  columns: ClassVar = {'failed': 'string', 'task': 'string', 'test_output': 'string'}
  empty_reply: ClassVar = shell_session.SUBMIT_REPLY

  def __init__(
    self,
    *,
    tasks: str = '',
    sandbox: Component = 'local',
    shell: Component = 'shell',
    build: Literal['run', 'copy'] = 'run',
    test_command: str = '',
    time_factor: float = 1.0,
    setup_seconds: float = 600.0,
  ):
    self.check(tasks=tasks, sandbox=sandbox, shell=shell)
    self._tasks = Path(tasks).expanduser()
    self._make_sandbox = sandbox_factory(sandbox)
    self._local = as_call(sandbox).name == 'local'
    self._shell = shell_session.make_shell_session(shell)
    self._build = build
    self._test_command = test_command
    self._time_factor = time_factor
    self._setup_seconds = setup_seconds
    self._task: terminal_bench_tasks.TerminalTask | None = None  # the step at hand
    self._steps_left: list[terminal_bench_tasks.TerminalTask] = []
    self._rewards: list[Mapping[str, float] | None] = []  # of each step so far
    self._columns: Info = {}  # what is told of the steps so far
    self._sandbox: Sandbox | None = None  # the agent's
    self._test_sandbox: Sandbox | None = None
    self._solution_output = ''  # of a reference solution that did not end with 0

  @staticmethod
  def check(
    *,
    tasks: str = '',
    sandbox: Component = 'local',
    shell: Component = 'shell',
    **other_options: object,
  ) -> None:
    """Checks the options.

    Raises:
      ValueError: If an option cannot work.
    """
    del other_options  # their types are checked already
    if not tasks or not os.path.isdir(os.path.expanduser(tasks)):
      raise ValueError(f'option tasks={tasks!r} must name a folder of tasks')
    sandbox_factory(sandbox)
    shell_session.make_shell_session(shell)

  def reset(
    self, *, seed: int, options: ResetOptions | None = None
  ) -> tuple[str | None, Info]:
    """Prepares the task in a new sandbox."""
    self.kill()
    task = (options or {}).get('task')
    if task is None or task.item is None:
      raise ValueError(
        'terminal_bench needs a data set whose rows name tasks: set dataset.path'
      )
    folder = self._tasks / str(task.item['question'])
    task = terminal_bench_tasks.read_terminal_task(folder)
    steps = task.steps or (task,)
    self._task, self._steps_left = task, [*steps[1:]]
    self._rewards, self._columns = [], {}
    with workdirs.scratch_workdir() as scratch:
      for number, step in enumerate(steps):
        if self._local and step.has_test_image:  # what is wrong is said now
          dockerfile.stage_dockerfile(step.test_context, scratch / f'tests{number}')
      sandbox = self._open(scratch / 'files', task.context, task.name)
    if any(step.is_separate for step in steps):
      sandbox.put(harbor_artifacts.ARTIFACTS_DIR, None)
    problem = task.start_check.run(sandbox) if task.start_check else ''
    if problem := problem or self._prepare_step(steps[0]):
      raise SandboxError(f'{task.name}: {problem}')
    self._shell.start(sandbox, self._time_factor * steps[0].agent_seconds)
    return f'{steps[0].instruction}\n\n{shell_session.SHELL_HELP}', {}

  def _prepare_step(self, step: terminal_bench_tasks.TerminalTask) -> str:
    """Makes a step the one at hand; returns what went wrong, or ''."""
    sandbox = self._sandbox
    if sandbox is None:
      raise SandboxError('the sandbox was stopped')
    self._task, self._solution_output = step, ''
    if step.files is not None and (problem := self._copy_files(step, sandbox)):
      return f'setup of step {step.step} {problem}'
    if step.step_check is not None and (problem := step.step_check.run(sandbox)):
      return f'step {step.step}: {problem}'
    return ''

  def _copy_files(
    self, step: terminal_bench_tasks.TerminalTask, sandbox: Sandbox
  ) -> str:
    """Copies a step's files and runs its setup.sh; returns how that failed, or ''."""
    assert step.files is not None
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode='w') as archive:
      archive.add(step.files, '.')
    result = sandbox.exec(
      ['tar', '-xf', '-', '--no-same-owner'], stdin=packed.getvalue()
    )
    if not result.code and (step.files / 'setup.sh').is_file():
      result = sandbox.exec(['bash', 'setup.sh'], seconds=self._setup_seconds)
    return f'ended with {result.code}: {result.text[-500:]}' if result.code else ''

  def _begin_next_step(self) -> str:
    """Begins the next step, unless there is none or the last one fell short."""
    task, rewards = self._task, self._rewards[-1] if self._rewards else None
    if task is None or not self._steps_left or rewards is None:
      return ''
    for name, least in task.min_reward.items():
      if rewards.get(name, -math.inf) < least:
        return ''
    step = self._steps_left.pop(0)
    if self._test_sandbox is not None:
      self._test_sandbox.stop()
      self._test_sandbox = None
    elif self._sandbox is not None:
      for folder in (terminal_bench_tasks.TESTS_DIR, harbor_tasks.REWARDS_DIR):
        self._sandbox.put(folder, None)  # no agent sees them
    if problem := self._prepare_step(step):
      self._columns['failed'] = problem
      return ''
    self._shell.go_on(self._time_factor * step.agent_seconds)
    return step.instruction

  def _open(
    self, scratch: Path, context: Path, name: str, *, for_tests: bool = False
  ) -> Sandbox:
    """Starts a sandbox of the task, carrying out its Dockerfile if it is local.

    Args:
      scratch: A folder to make, for files on their way.
      context: The folder of the Dockerfile.
      name: What stands for `{task}` in the name of an image.
      for_tests: Whether only the tests run in it.
    """
    assert self._task is not None
    scratch.mkdir()
    if not self._local:
      staged = dockerfile.StagedDockerfile(workdir='')  # its image has it all
    else:
      staged = dockerfile.stage_dockerfile(context, scratch)
    sandbox = self._make_sandbox(
      folders=staged.folders,
      workdir=self._task.workdir or staged.workdir,
      task=name,
      environment={**staged.environment, **self._task.variables},
    )
    if for_tests:  # kept before it starts: kill() must find it
      self._test_sandbox = sandbox
    else:
      self._sandbox = sandbox
    sandbox.start()
    workdir = self._task.workdir or staged.workdir
    if self._local and sandbox.exec(['pwd']).text.strip() != workdir:
      raise SandboxError(
        "tasks of terminal_bench name paths from the root, which unsafe=True can't "
        'give: use docker or podman where there are no namespaces'
      )
    for workdir, command in staged.commands if self._build == 'run' else ():
      script = f'mkdir -p "$0" && cd "$0" && {command}'
      argv = ['sh', '-c', script, workdir]
      result = sandbox.exec(argv, seconds=self._setup_seconds)
      if result.code:
        raise SandboxError(
          f'{self._task.name}: RUN {command[:200]} ended with {result.code}: '
          f"{result.text[-500:]} (build='copy' leaves RUN out; docker needs none of it)"
        )
    return sandbox

  def apply_solution(self) -> str | None:
    """Runs the task's solution.sh or solution/solve.sh, within the agent's time.

    How it ended only matters for the tests' output: the tests judge it.

    Returns:
      The reply that submits it; None if the task has no such script.
    """
    task, sandbox = self._task, self._sandbox
    assert task is not None and sandbox is not None, 'call reset before apply_solution'
    folder = terminal_bench_tasks.SOLUTION_DIR
    with workdirs.scratch_workdir() as scratch:
      if not task.stage_solution(scratch / 'solution'):
        return None
      sandbox.put(folder, f'{scratch}/solution')
    seconds = self._time_factor * task.agent_seconds
    variables = [f'{name}={value}' for name, value in task.solution_variables.items()]
    argv = ['env', *variables, 'bash', f'{folder}/{task.solution}']
    result = sandbox.exec(argv, seconds=seconds)
    if result.code:
      output = test_results.describe_run(result, seconds)
      self._solution_output = f'the reference solution: {output}\nthe tests: '
    return shell_session.SUBMIT_REPLY

  def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
    """Runs the reply's command, or runs the tests when the agent is done."""
    return shell_session.shell_env_step(
      self._shell, action, self._grade, self.kill, self._begin_next_step
    )

  def _grade(self) -> tuple[float, Info]:
    task, sandbox = self._task, self._sandbox
    assert task is not None
    if sandbox is None:
      raise SandboxError('the sandbox was stopped')
    with workdirs.scratch_workdir() as scratch:
      if task.is_separate:
        sandbox = self._open_for_tests(sandbox, scratch)
      if not task.has_test_image:
        task.stage_tests(scratch / 'tests')
        sandbox.put(terminal_bench_tasks.TESTS_DIR, f'{scratch}/tests')
    if task.writes_reward:
      sandbox.put(harbor_tasks.REWARDS_DIR, None)
    script = f'{terminal_bench_tasks.TESTS_DIR}/{task.script}'
    # Harbor runs the script by its own first line.
    command = self._test_command or (script if task.writes_reward else f'bash {script}')
    variables = (
      f'TEST_DIR={terminal_bench_tasks.TESTS_DIR}',
      'PYTHONDONTWRITEBYTECODE=1',
      *(f'{name}={value}' for name, value in task.test_variables.items()),
    )
    shell = 'bash' if task.writes_reward else 'sh'
    argv = ['env', *variables, shell, '-c', command]
    seconds = self._time_factor * task.test_seconds
    result = sandbox.exec(argv, seconds=seconds)
    # The agent cannot have removed this machine's own programs.
    if self._local and _lacks_program(result):
      raise SandboxError(
        f'{task.name}: {command} calls a program that is not installed: '
        f'{result.text[-500:]} (another test_command may do without)'
      )
    output = self._solution_output + test_results.describe_run(result, seconds)
    columns = {'failed': '', 'task': task.name, 'test_output': output}
    if task.step:
      before = self._columns.get('test_output', '')
      columns['test_output'] = f'{before}step {task.step}: {output}\n'
    if task.writes_reward:
      self._columns = columns
      return self._read_rewards(sandbox, result, columns)
    passed = test_results.parse_pytest_summary(result.stdout.decode('utf-8', 'replace'))
    failed = [name for name, ok in passed.items() if not ok]
    if not passed and result.code == 0:
      failed = ["no pytest summary in the tests' output"]
    solved = bool(passed) and not failed and result.code == 0
    share = sum(passed.values()) / len(passed) if passed else 0.0
    columns['failed'] = '\n'.join(failed)
    metrics = {'passed': share, 'test_timeout': float(result.limit == 'time')}
    return float(solved), {'metrics': metrics, 'columns': columns}

  def _open_for_tests(self, sandbox: Sandbox, scratch: Path) -> Sandbox:
    """Returns a sandbox for the tests, with the artifacts of the agent's.

    The agent's is ended unless a step may follow in it.
    """
    task = self._task
    assert task is not None
    (scratch / 'artifacts').mkdir()
    copies = harbor_artifacts.collect_artifacts(
      sandbox, task.artifacts, scratch / 'artifacts'
    )
    if self._sandbox is not sandbox:
      raise SandboxError('the sandbox was stopped')
    if not self._steps_left:
      sandbox.stop()
    name = f'{task.name}-tests' if task.has_test_image else task.name
    sandbox = self._open(scratch / 'files', task.test_context, name, for_tests=True)
    harbor_artifacts.hand_over_artifacts(sandbox, copies)
    if task.has_test_image:  # as Harbor does, whatever the mode of the files is
      script = f'{terminal_bench_tasks.TESTS_DIR}/{task.script}'
      sandbox.exec(['chmod', '+x', '--', script])
    return sandbox

  def _read_rewards(
    self, sandbox: Sandbox, result: ExecResult, columns: Info
  ) -> tuple[float, Info]:
    """Reads the rewards of the step at hand.

    Returns:
      The reward of all steps so far, and the info with all that their tests wrote.
    """
    task, files = self._task, {}
    assert task is not None
    for name in harbor_tasks.REWARD_FILES:
      argv = ['cat', '--', f'{harbor_tasks.REWARDS_DIR}/{name}']
      read = sandbox.exec(argv, output=harbor_tasks.MAX_REWARD_BYTES)
      if read.code == 0:
        files[name] = read.stdout
    rewards, reward, others = None, 0.0, {}
    try:
      if result.limit:
        raise ValueError(f'the tests reached their limit of {result.limit}')
      rewards = harbor_tasks.parse_rewards(files)
    except ValueError as error:
      columns['failed'] = f'step {task.step}: {error}' if task.step else str(error)
    self._rewards.append(rewards)
    if any(self._rewards):
      try:
        reward, others = harbor_tasks.combine_rewards(
          self._rewards, counts_last=task.counts_last
        )
      except ValueError as error:
        columns['failed'] = columns['failed'] or str(error)
    shares = {'passed': reward, 'test_timeout': float(result.limit == 'time')}
    metrics = {f'reward/{name}': value for name, value in others.items()} | shares
    return reward, {'metrics': metrics, 'columns': columns}

  def kill(self) -> None:
    """Ends everything that runs and removes its files, from any thread."""
    sandboxes = self._sandbox, self._test_sandbox
    self._sandbox = self._test_sandbox = None
    for sandbox in sandboxes:
      if sandbox is not None:
        sandbox.stop()

  close = kill


def _lacks_program(result: ExecResult) -> bool:
  """Returns whether one of this machine's own programs was missing."""
  if result.code != 127 or 'test session starts' in result.text:
    return False
  return _PROGRAM_NOT_FOUND.search(result.text) is not None
