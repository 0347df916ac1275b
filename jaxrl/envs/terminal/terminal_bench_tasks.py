"""TerminalTask is a task folder of Terminal-Bench, in its first or second form.

First form: task.yaml, Dockerfile, run-tests.sh, tests/, solution.sh. Second form
(Terminal-Bench 2, Harbor): task.toml, instruction.md, environment/Dockerfile,
tests/test.sh, solution/; or several steps, each with its own instruction, tests and
solution below steps/. See https://github.com/laude-institute/terminal-bench and
https://harborframework.com/docs.
"""

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path

from jaxrl.envs.terminal import harbor_artifacts, harbor_tasks
from jaxrl.envs.terminal.health_check import HealthCheck
from jaxrl.options import JsonObject

TESTS_DIR = '/tests'  # where a task's tests lie when they run
SOLUTION_DIR = '/solution'  # where a task's reference solution lies when it runs


@dataclasses.dataclass(frozen=True)
class TerminalTask:
  """One task, or one step of a task.

  Attributes:
    name: The name of the folder.
    folder: The folder.
    instruction: What the agent is to do.
    agent_seconds: Wall-clock seconds that the agent has.
    test_seconds: Wall-clock seconds that the tests have.
    context: The folder of the Dockerfile.
    script: The name of the test script below `TESTS_DIR`.
    solution: The name of the solution's script below `SOLUTION_DIR`; there may be none.
    writes_reward: Whether the tests write a reward to `harbor_tasks.REWARDS_DIR`;
      otherwise pytest's summary in their output counts.
    workdir: The folder in which everything runs; '' means the Dockerfile's.
    variables: Environment variables of everything.
    test_variables: Environment variables of the tests.
    solution_variables: Environment variables of the reference solution.
    is_separate: Whether the tests run in a sandbox of their own.
    artifacts: What the agent hands over to such tests.
    step: The name of the step; '' for a task.
    min_reward: The rewards, by name, below which no further step begins.
    steps: The steps of a task of the second form, in order; at least one.
    counts_last: Whether the reward is that of the last step, rather than the mean.
    start_check: What must succeed once the sandbox has started.
    step_check: What must succeed before the step begins.
  """

  name: str
  folder: Path
  instruction: str
  agent_seconds: float
  test_seconds: float
  context: Path
  script: str
  solution: str
  writes_reward: bool
  workdir: str = ''
  variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
  test_variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
  solution_variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
  is_separate: bool = False
  artifacts: tuple[harbor_artifacts.Artifact, ...] = ()
  step: str = ''
  min_reward: Mapping[str, float] = dataclasses.field(default_factory=dict)
  steps: tuple['TerminalTask', ...] = ()
  counts_last: bool = False
  start_check: HealthCheck | None = None
  step_check: HealthCheck | None = None

  @property
  def step_folder(self) -> Path:
    """The folder of the step, or of a task without steps."""
    return self.folder / 'steps' / self.step if self.step else self.folder

  @property
  def test_folders(self) -> tuple[Path, ...]:
    """The folders of tests; a file of a later one replaces that of an earlier one."""
    folders = dict.fromkeys((self.folder, self.step_folder))
    return tuple(f / 'tests' for f in folders if (f / 'tests').is_dir())

  @property
  def has_test_image(self) -> bool:
    """Whether separate tests have a Dockerfile of their own, which brings them."""
    return self.is_separate and self.test_context != self.context

  @property
  def test_context(self) -> Path:
    """The folder of the Dockerfile of separate tests."""
    for tests in reversed(self.test_folders):
      if (tests / 'Dockerfile').is_file():
        return tests
    return self.context

  @property
  def files(self) -> Path | None:
    """The folder that is copied to where commands run before a step begins."""
    folder = self.step_folder / 'workdir'
    return folder if self.step and folder.is_dir() else None

  def stage_tests(self, folder: Path) -> None:
    """Copies everything that grading needs.

    Args:
      folder: The folder to create.
    """
    folder.mkdir()
    for tests in self.test_folders:
      shutil.copytree(tests, folder, symlinks=True, dirs_exist_ok=True)
    if not self.writes_reward:
      shutil.copy(self.folder / self.script, folder / self.script)
    if not (folder / self.script).is_symlink():
      (folder / self.script).chmod(0o755)

  def stage_solution(self, folder: Path) -> bool:
    """Copies the reference solution.

    Args:
      folder: The folder to create.

    Returns:
      Whether the task has a solution; nothing is created if it has none.
    """
    source = self.step_folder / 'solution' if self.writes_reward else self.folder
    script = source / self.solution
    if not script.is_file():
      return False
    if self.writes_reward:
      shutil.copytree(source, folder, symlinks=True)
    else:
      folder.mkdir()
      shutil.copy(script, folder / self.solution)
    return True


def read_terminal_task(folder: Path) -> TerminalTask:
  """Reads the task in a folder.

  Args:
    folder: The folder.

  Returns:
    The task.

  Raises:
    ValueError: If the folder is not a valid task; the error says why.
  """
  if (folder / 'task.toml').is_file():
    return _read_second_form(folder)
  if (folder / 'task.yaml').is_file():
    return _read_first_form(folder)
  raise ValueError(
    f'{folder} is not a task of Terminal-Bench: it has neither task.yaml nor task.toml'
  )


def _read_first_form(folder: Path) -> TerminalTask:
  settings = _load_yaml(folder / 'task.yaml')
  instruction = settings.get('instruction')
  if not instruction and isinstance(settings.get('descriptions'), list):
    # This is the form of older tasks.
    instruction = settings['descriptions'][0].get('description')
  parser = settings.get('parser_name', 'pytest')
  if parser != 'pytest':
    raise ValueError(f'{folder}: parser_name {parser!r}; only pytest is supported')
  compose = folder / 'docker-compose.yaml'
  if compose.is_file() and len(_load_yaml(compose).get('services') or {}) > 1:
    raise ValueError(f'{folder} needs several containers, and only one is supported')
  return _validated(
    TerminalTask(
      name=folder.name,
      folder=folder,
      instruction=str(instruction or ''),
      agent_seconds=float(settings.get('max_agent_timeout_sec', 360)),
      test_seconds=float(settings.get('max_test_timeout_sec', 60)),
      context=folder,
      script='run-tests.sh',
      solution='solution.sh',
      writes_reward=False,
    )
  )


def _read_second_form(folder: Path) -> TerminalTask:
  task = harbor_tasks.read_harbor_task(folder)
  steps = tuple(
    _validated(
      TerminalTask(
        name=folder.name,
        folder=folder,
        instruction=settings.instruction,
        agent_seconds=settings.agent_seconds,
        test_seconds=settings.test_seconds,
        context=folder / 'environment',
        script='test.sh',
        solution='solve.sh',
        writes_reward=True,
        workdir=settings.workdir,
        variables=settings.variables,
        test_variables=settings.test_variables,
        solution_variables=settings.solution_variables,
        is_separate=settings.is_separate,
        artifacts=settings.artifacts,
        step=settings.step,
        min_reward=settings.min_reward,
        counts_last=task.counts_last,
        start_check=settings.start_check,
        step_check=settings.step_check,
      )
    )
    for settings in task.steps
  )
  return dataclasses.replace(steps[0], steps=steps)


def _validated(task: TerminalTask) -> TerminalTask:
  if not task.instruction.strip():
    raise ValueError(f'{task.step_folder} has no instruction')
  folders = task.test_folders if task.writes_reward else (task.folder,)
  if not any((folder / task.script).is_file() for folder in folders):
    script = f'tests/{task.script}' if task.writes_reward else task.script
    raise ValueError(f'{task.step_folder} has no {script}')
  return task


def _load_yaml(file: Path) -> JsonObject:
  import yaml  # the other form needs none

  settings = yaml.safe_load(file.read_text())
  if not isinstance(settings, dict):
    raise ValueError(f'{file}: must hold a mapping')
  return settings
