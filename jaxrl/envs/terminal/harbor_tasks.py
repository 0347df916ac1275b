"""HarborTask is what a task folder of Harbor says; its rewards are read here, too.

See https://harborframework.com/docs. What would change an episode or its tests, but is
not supported, is refused by the name of its key in task.toml.
"""

import dataclasses
import json
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl.envs.terminal import harbor_artifacts
from jaxrl.envs.terminal.health_check import HealthCheck, read_health_check

REWARDS_DIR = '/logs/verifier'  # where tests write their rewards
REWARD_FILES = ('reward.json', 'reward.txt')  # the first of them that exists counts
MAX_REWARD_BYTES = 1 << 16
_MAX_REWARDS = 64
_MAX_FILE_BYTES = 1 << 20  # of task.toml and instruction.md
_MAX_STEPS = 64
_STEP_NAME = re.compile(
  r'(?!\.{1,2}$)[^/\\:*?"<>|\x00-\x1f]{0,200}[^/\\:*?"<>|\x00-\x1f. ]'
)
_DEFAULT_SECONDS = 600.0
_VARIABLE = re.compile(r'\$\{([^}:]+)(?::-(.*))?\}')
# Benchmarks mark their files with such lines, which no agent is to see.
_CANARY = re.compile(r'(<!--.*canary.*-->|#.*canary.*)', re.IGNORECASE)
_ROOT = (None, 'root', 0, '0')
Table = Mapping[str, Any]  # of task.toml


@dataclasses.dataclass(frozen=True)
class HarborSettings:
  """The settings of one task, or of one of its steps.

  Attributes:
    step: The name of the step; '' for a task without steps.
    min_reward: The rewards, by name, below which no further step begins.
    instruction: What the agent is to do.
    agent_seconds: Wall-clock seconds that the agent has.
    test_seconds: Wall-clock seconds that the tests have.
    workdir: The folder in which commands run; '' means the Dockerfile's.
    variables: Environment variables of the agent and the tests.
    test_variables: Environment variables of the tests.
    solution_variables: Environment variables of the reference solution.
    is_separate: Whether the tests run in a sandbox of their own.
    artifacts: What the agent hands over to such tests.
    start_check: What must succeed once the sandbox has started.
    step_check: What must succeed after the step's setup.
  """

  step: str
  min_reward: Mapping[str, float]
  instruction: str
  agent_seconds: float
  test_seconds: float
  workdir: str
  variables: Mapping[str, str]
  test_variables: Mapping[str, str]
  solution_variables: Mapping[str, str]
  is_separate: bool
  artifacts: tuple[harbor_artifacts.Artifact, ...]
  start_check: HealthCheck | None
  step_check: HealthCheck | None


@dataclasses.dataclass(frozen=True)
class HarborTask:
  """A task: one or several steps, which an agent does one after the other.

  Attributes:
    steps: The settings of each; a task without steps is one step without a name.
    counts_last: Whether the reward is that of the last step, rather than the mean.
  """

  steps: tuple[HarborSettings, ...]
  counts_last: bool


def read_harbor_task(folder: Path) -> HarborTask:
  """Reads task.toml and the instructions.

  Args:
    folder: The folder of the task.

  Returns:
    The task.

  Raises:
    ValueError: If they are wrong, or ask for something that is not supported.
  """
  try:
    settings = tomllib.loads(_read_text(folder / 'task.toml'))
  except tomllib.TOMLDecodeError as error:
    raise ValueError(f'{folder}/task.toml: {error}') from error
  strategy = settings.get('multi_step_reward_strategy')
  if strategy not in (None, 'mean', 'final'):
    raise ValueError(
      f'{folder}/task.toml: multi_step_reward_strategy={strategy!r}: must be mean or '
      'final'
    )
  steps = settings.get('steps') or [None]
  if not isinstance(steps, list) or len(steps) > _MAX_STEPS:
    raise ValueError(f'{folder}/task.toml: steps must be at most {_MAX_STEPS} tables')
  read = tuple(_read_step(folder, settings, step) for step in steps)
  if len({step.step.casefold() for step in read}) < len(read):
    raise ValueError(f'{folder}/task.toml: two steps have the same name')
  return HarborTask(read, strategy == 'final')


def _read_step(folder: Path, settings: Table, step: Any) -> HarborSettings:
  """Reads a step: what it leaves out of `agent` and `verifier` is the task's."""
  agent, tests, environment, solution = (
    _table(folder, settings, name)
    for name in ('agent', 'verifier', 'environment', 'solution')
  )
  name, own, artifacts = '', {}, settings.get('artifacts', [])
  place = folder
  if step is not None:
    own, name = step, step.get('name') if isinstance(step, dict) else None
    if not isinstance(name, str) or not _STEP_NAME.fullmatch(name):
      raise ValueError(f'{folder}/task.toml: a step needs a name, and has {name!r}')
    place = folder / 'steps' / name
    agent = {**agent, **_table(folder, own, 'agent')}
    of_step = _table(folder, own, 'verifier')
    variables = {**_table(folder, tests, 'env'), **_table(folder, of_step, 'env')}
    tests = {**tests, **of_step, 'env': variables}
    listed = own.get('artifacts', [])
    if not isinstance(artifacts, list) or not isinstance(listed, list):
      raise ValueError(f'{folder}/task.toml: artifacts must be a list')
    artifacts = [*artifacts, *listed]
  _refuse(folder, agent, tests, environment)
  instruction = place / 'instruction.md'
  text = _read_text(instruction) if instruction.is_file() else ''
  workdir = environment.get('workdir') or ''
  if not isinstance(workdir, str) or (workdir and not workdir.startswith('/')):
    raise ValueError(f'{folder}: environment.workdir={workdir!r} must begin with /')
  return HarborSettings(
    step=name,
    min_reward=_min_reward(folder, own),
    instruction=_without_canary(text),
    agent_seconds=_seconds(folder, 'agent', agent),
    test_seconds=_seconds(folder, 'verifier', tests),
    workdir=workdir,
    variables=_variables(folder, 'environment', environment),
    test_variables=_variables(folder, 'verifier', tests),
    solution_variables=_variables(folder, 'solution', solution),
    is_separate=tests.get('environment_mode') == 'separate',
    artifacts=harbor_artifacts.read_artifacts(folder, artifacts),
    start_check=_health_check(folder, 'environment', environment),
    step_check=_health_check(folder, 'steps', own),
  )


def _health_check(folder: Path, name: str, table: Table) -> HealthCheck | None:
  key = f'{folder}/task.toml: {name}.healthcheck'
  return read_health_check(table.get('healthcheck'), key)


def _read_text(file: Path) -> str:
  if file.stat().st_size > _MAX_FILE_BYTES:
    raise ValueError(f'{file} has more than {_MAX_FILE_BYTES} bytes')
  return file.read_text()


def _table(folder: Path, settings: Table, name: str) -> Table:
  table = settings.get(name, {})
  if not isinstance(table, dict):
    raise ValueError(f'{folder}/task.toml: {name} must be a table')
  return table


def _min_reward(folder: Path, step: Table) -> Mapping[str, float]:
  """Returns the thresholds of a step, by the name of the reward."""
  value = step.get('min_reward', {})
  thresholds = value if isinstance(value, dict) else {'reward': value}
  for threshold in thresholds.values():
    if isinstance(threshold, bool) or not isinstance(threshold, int | float):
      raise ValueError(f'{folder}/task.toml: min_reward={value!r} must be numbers')
  return {name: float(threshold) for name, threshold in thresholds.items()}


def _refuse(
  folder: Path,
  agent: Table,
  tests: Table,
  environment: Table,
) -> None:
  """Raises ValueError for what is not supported."""
  mode = tests.get('environment_mode')
  refused = {
    'verifier.environment': tests.get('environment'),
    'verifier.environment_mode': (
      mode if mode not in ('shared', 'separate', None) else None
    ),
    'verifier.collect': tests.get('collect'),
    'agent.user': None if agent.get('user') in _ROOT else agent['user'],
    'verifier.user': None if tests.get('user') in _ROOT else tests['user'],
    'environment.mcp_servers': environment.get('mcp_servers'),
    'environment.skills_dir': environment.get('skills_dir'),
    'environment.gpus': environment.get('gpus'),
    'environment.tpu': environment.get('tpu'),
  }
  for key, value in refused.items():
    if value:
      raise ValueError(f'{folder}/task.toml: {key} is not supported')
  if str(environment.get('os', 'linux')).lower() != 'linux':
    raise ValueError(f'{folder}/task.toml: environment.os must be linux')
  for name in ('docker-compose.yaml', 'docker-compose.yml'):
    if (folder / 'environment' / name).exists():
      raise ValueError(
        f'{folder} needs environment/{name}, and only one container, without compose, '
        'is supported'
      )


def _seconds(folder: Path, name: str, table: Table) -> float:
  seconds = table.get('timeout_sec')
  if seconds is None:
    return _DEFAULT_SECONDS
  if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds <= 0:
    raise ValueError(f'{folder}/task.toml: {name}.timeout_sec={seconds!r}: must be > 0')
  return float(seconds)


def _variables(folder: Path, name: str, table: Table) -> dict[str, str]:
  """Returns environment variables; `${NAME}` stands for one of this process."""
  values = table.get('env', {})
  where = f'{folder}/task.toml: {name}.env'
  if not isinstance(values, dict):
    raise ValueError(f'{where} must be a table')
  variables = {}
  for key, value in values.items():
    if not isinstance(value, str) or '\0' in value or '=' in key:
      raise ValueError(f'{where}.{key} must be a text')
    match = _VARIABLE.fullmatch(value)
    if match is not None:
      found = os.environ.get(match[1], match[2])
      if found is None:
        raise ValueError(f'{where}.{key}: ${match[1]} is not set')
      value = found
    variables[key] = value
  return variables


def _without_canary(text: str) -> str:
  lines = text.split('\n')
  start = 0
  while start < len(lines) and _CANARY.fullmatch(lines[start].strip()):
    start += 1
  while start < len(lines) and not lines[start].strip():
    start += 1
  return '\n'.join(lines[start:])


def parse_rewards(files: Mapping[str, bytes]) -> dict[str, float]:
  """Parses the rewards that tests wrote.

  Args:
    files: The contents of the files of `REWARD_FILES` that exist.

  Returns:
    The rewards by name, of which there is at least one.

  Raises:
    ValueError: If there is no reward; the error says why.
  """
  name = next((name for name in REWARD_FILES if name in files), None)
  if name is None:
    raise ValueError(f'the tests wrote no {" or ".join(REWARD_FILES)}')
  try:
    text = files[name].decode()
    value = json.loads(text) if name == 'reward.json' else {'reward': float(text)}
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{name}: {error}') from error
  if not isinstance(value, dict) or not 0 < len(value) <= _MAX_REWARDS:
    raise ValueError(f'{name}: must be an object with 1 to {_MAX_REWARDS} numbers')
  for key, number in value.items():
    if not isinstance(number, int | float) or not math.isfinite(number):
      raise ValueError(f'{name}: {key} is {number!r}, no finite number'[:200])
  return {key: float(number) for key, number in value.items()}


def combine_rewards(
  steps: Sequence[Mapping[str, float] | None], *, counts_last: bool
) -> tuple[float, dict[str, float]]:
  """Combines the rewards of a task's steps, as Harbor does.

  Args:
    steps: The rewards of each step that was graded; None where its tests wrote none.
    counts_last: Whether the last step alone counts, rather than the mean. A name that a
      step lacks counts as 0 in the mean; a step without rewards does not count.

  Returns:
    The reward, and the others by name. Of several, the reward is that called `reward`.

  Raises:
    ValueError: If there is no reward, or none of several is called `reward`.
  """
  counted = [step for step in (steps[-1:] if counts_last else steps) if step]
  if not counted:
    raise ValueError('no step has a reward')
  names = dict.fromkeys(name for step in counted for name in step)
  rewards = {
    name: sum(step.get(name, 0.0) for step in counted) / len(counted) for name in names
  }
  if len(rewards) > 1 and 'reward' not in rewards:
    raise ValueError(f'none of the {len(rewards)} rewards is called reward')
  main = 'reward' if 'reward' in rewards else next(iter(rewards))
  return rewards.pop(main), rewards
