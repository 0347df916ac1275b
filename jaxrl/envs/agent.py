"""An agent of your own, which plays its episode through the OpenAI-compatible endpoint.

It is not stepped: it is run, and calls the model itself; see `rollout.agents`.
"""

import importlib.util
import math
import shlex
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from jaxrl import signature
from jaxrl.envs.agent_calls import Call
from jaxrl.envs.agent_command import KEYS, Command
from jaxrl.envs.graders.answers import final_answer
from jaxrl.envs.graders.combine import make_grader
from jaxrl.signature import ConfigError


class Runs(Protocol):
  """What runs an agent: returns what it returned, or raises. kill: from any thread."""

  def __call__(self, task: Mapping[str, Any], base_url: str, api_key: str) -> Any: ...

  def kill(self) -> None: ...


class AgentEnv:
  """Runs an agent on the task's row.

  agent: a function, 'package.module:run' or 'file.py:run', with options of its own as
  in 'file.py:run(rounds=3)'. It is plain or async and is given what it names of task
  (the row, with `episode_seed`), base_url, api_key, and client (OpenAI's, ready).
  command: a program instead, started once an episode, with OPENAI_BASE_URL and
  OPENAI_API_KEY in its environment and the task as JSON on its standard input; it has
  no shell. memory_gib: address space of each of its processes, 0 = any.

  The reward is what the agent returns (a number, or {'reward', 'metrics', 'given'}; a
  command's last line if that is such an object), plus what it sent to /feedback, plus
  the grade of the last reply if there is a `grader`, a call string (see
  graders.combine.make_grader). Each takes one of `env.<tag>.concurrency` threads.
  """

  played_by_agent = True
  columns: ClassVar = {'given': 'string', 'grader_fault': 'string'}

  def __init__(
    self,
    *,
    agent: str = '',
    command: str = '',
    grader: str = '',
    memory_gib: float = 0.0,
  ):
    if bool(agent) == bool(command):
      raise ConfigError(
        "the agent environment: say who plays, by agent='my_agent.py:run' or by "
        "command='python my_agent.py', and not by both"
      )
    if memory_gib < 0:
      raise ConfigError('the agent environment: memory_gib must not be negative')
    if memory_gib and agent:
      raise ConfigError('the agent environment: memory_gib is for a command')
    self._run: Runs = Call(agent) if agent else Command(_split(command), memory_gib)
    self._grader = make_grader(grader) if grader else None
    self._task: dict[str, Any] = {}

  @classmethod
  def check(cls, **options: Any) -> None:
    """Raises ConfigError for an agent or a grader that cannot be had."""
    if importlib.util.find_spec('aiohttp') is None:
      raise ConfigError(
        "agents are served by aiohttp: install it, pip install 'jaxrl[serve]'"
      )
    cls(**options)

  def reset(
    self, *, seed: int, options: Mapping[str, Any] | None = None
  ) -> tuple[str, dict[str, Any]]:
    task = (options or {}).get('task')
    if task is None or task.item is None:
      raise ValueError("an agent's tasks are the rows of a data set, and it has none")
    self._task = {**task.item, 'episode_seed': seed}
    return '', {}

  def run(self, base_url: str, api_key: str) -> dict[str, Any]:
    """Runs the agent; what it says of itself: reward, metrics, given.

    Blocks. Raises whatever the agent raises, ValueError for what it must not return.
    """
    return _said(self._run(self._task, base_url, api_key))

  def judge(
    self, said: Mapping[str, Any], reply: str, feedback: float
  ) -> dict[str, Any]:
    """The episode's reward, and what is to be told of it, as an `info`.

    said: what `run` returned. reply: the last one. feedback: what was sent.
    """
    reward = float(said.get('reward') or 0.0)
    metrics = {'reward/agent': reward, 'reward/feedback': feedback}
    columns = {'given': str(said.get('given') or final_answer(reply))}
    total = reward + feedback
    if self._grader is not None:
      grade = self._grader(reply, self._task)
      metrics |= grade.metrics
      metrics['accuracy'] = float(next(iter(grade.parts.values())) >= 1)
      columns['grader_fault'] = grade.fault
      total += grade.score
    return {
      'reward': total,
      'metrics': metrics | dict(said.get('metrics') or {}),
      'columns': columns,
    }

  def kill(self) -> None:
    """Ends a command and all its processes; a function cannot be ended."""
    self._run.kill()


def _split(command: str) -> list[str]:
  try:
    parts = shlex.split(command)
  except ValueError as error:
    raise ConfigError(f'env_config.command={command!r}: {error}') from error
  if not parts:
    raise ConfigError(f'env_config.command={command!r}: it names no program')
  return parts


def _said(value: Any) -> dict[str, Any]:
  """What an agent returned, in one form. Raises ValueError."""
  if value is None:
    return {}
  said = dict(value) if isinstance(value, Mapping) else {'reward': value}
  if strange := said.keys() - set(KEYS):
    raise signature.unknown(str(min(strange, key=str)), KEYS, 'key', 'agent')
  metrics = said.get('metrics') or {}
  if not isinstance(metrics, Mapping):
    raise ValueError(f'the agent returned metrics {metrics!r}: no mapping'[:200])
  for name, number in [('reward', said.get('reward') or 0.0), *metrics.items()]:
    if not isinstance(number, bool | int | float) or not math.isfinite(number):
      raise ValueError(f'the agent returned {name} {number!r}: no number'[:200])
  return said
