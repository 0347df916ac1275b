"""Tasks as Terminal-Bench has them: a folder each, in its first form or its second.

First: task.yaml, Dockerfile, run-tests.sh, tests/, solution.sh. Second (Terminal-Bench
2, Harbor): task.toml, instruction.md, environment/Dockerfile, tests/test.sh, solution/.
https://github.com/laude-institute/terminal-bench, https://harborframework.com/docs
"""

import dataclasses
import importlib
import importlib.util
import shutil
import tomllib
from pathlib import Path
from typing import Any

from jaxrl.signature import ConfigError

TESTS = '/tests'  # where a task's tests lie when they run
REWARDS = '/logs/verifier'  # where those of the second form write their reward


@dataclasses.dataclass(frozen=True)
class TerminalTask:
  """One task. seconds are wall clock; context: the folder of the Dockerfile.

  script: the test script's name below `TESTS`. writes_reward: it leaves a reward in
  `REWARDS`; otherwise pytest's summary, in its output, tells.
  """

  name: str
  folder: Path
  instruction: str
  agent_seconds: float
  test_seconds: float
  context: Path
  script: str
  writes_reward: bool

  def stage_tests(self, folder: Path) -> None:
    """Writes all that grading needs into a folder that does not exist yet."""
    tests = self.folder / 'tests'
    if tests.is_dir():
      shutil.copytree(tests, folder, symlinks=True)
    else:
      folder.mkdir()
    if not self.writes_reward:
      shutil.copy(self.folder / self.script, folder / self.script)


def read_task(folder: Path) -> TerminalTask:
  """The task in a folder. ValueError says what is wrong with it."""
  if (folder / 'task.toml').is_file():
    return _second(folder)
  if (folder / 'task.yaml').is_file():
    return _first(folder)
  raise ValueError(f'{folder} is no task of Terminal-Bench: no task.yaml, no task.toml')


def check() -> None:
  """Raises ConfigError where the package that reads the first form is missing."""
  if importlib.util.find_spec('yaml') is None:
    raise ConfigError('terminal_bench reads task.yaml by PyYAML: pip install pyyaml')


def _first(folder: Path) -> TerminalTask:
  facts = _yaml(folder / 'task.yaml')
  instruction = facts.get('instruction')
  if not instruction and isinstance(facts.get('descriptions'), list):
    instruction = facts['descriptions'][0].get('description')  # as older tasks have it
  parser = facts.get('parser_name', 'pytest')
  if parser != 'pytest':
    raise ValueError(f'{folder}: parser_name {parser!r}; only pytest is known')
  compose = folder / 'docker-compose.yaml'
  if compose.is_file() and len(_yaml(compose).get('services') or {}) > 1:
    raise ValueError(f'{folder} asks for several containers; only one is known here')
  return _checked(
    TerminalTask(
      name=folder.name,
      folder=folder,
      instruction=str(instruction or ''),
      agent_seconds=float(facts.get('max_agent_timeout_sec', 360)),
      test_seconds=float(facts.get('max_test_timeout_sec', 60)),
      context=folder,
      script='run-tests.sh',
      writes_reward=False,
    )
  )


def _second(folder: Path) -> TerminalTask:
  with (folder / 'task.toml').open('rb') as file:
    facts = tomllib.load(file)
  instruction = folder / 'instruction.md'
  return _checked(
    TerminalTask(
      name=folder.name,
      folder=folder,
      instruction=instruction.read_text() if instruction.is_file() else '',
      agent_seconds=float(facts.get('agent', {}).get('timeout_sec', 600)),
      test_seconds=float(facts.get('verifier', {}).get('timeout_sec', 600)),
      context=folder / 'environment',
      script='test.sh',
      writes_reward=True,
    )
  )


def _checked(task: TerminalTask) -> TerminalTask:
  if not task.instruction.strip():
    raise ValueError(f'{task.folder} has no instruction')
  script = task.folder / ('tests' if task.writes_reward else '') / task.script
  if not script.is_file():
    raise ValueError(f'{task.folder} has no {script.relative_to(task.folder)}')
  return task


def _yaml(file: Path) -> dict[str, Any]:
  check()
  facts = importlib.import_module('yaml').safe_load(file.read_text())
  if not isinstance(facts, dict):
    raise ValueError(f'{file} holds no mapping')
  return facts
