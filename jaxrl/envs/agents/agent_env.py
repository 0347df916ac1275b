"""AgentEnv runs a user's own agent, which plays through the OpenAI-compatible endpoint.

The environment is not stepped: the agent is run and calls the model itself; see
`jaxrl.rollout.gateway`.
"""

import math
import shlex
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from jaxrl.component_table import Component
from jaxrl.envs.agents.command_agent import RESULT_KEYS, CommandAgent
from jaxrl.envs.agents.function_agent import FunctionAgent
from jaxrl.envs.env_registry import (
  MAX_REWARD,
  Info,
  ResetOptions,
  as_real_number,
  is_valid_reward,
)
from jaxrl.envs.graders.answer_marks import final_answer
from jaxrl.envs.graders.composite import GraderCalls, make_grader
from jaxrl.envs.graders.rule_graders import GENERATION_PROMPT, TaskItem
from jaxrl.options import require_package, unknown_name_error

AgentResult = dict[str, Any]  # what an agent returned: reward, metrics, given


class AgentRunner(Protocol):
  """Protocol: runs an agent."""

  def __call__(self, task: TaskItem, base_url: str, api_key: str) -> Any:
    """Runs the agent on a task and returns its result, or raises its error."""
    ...

  def kill(self) -> None:
    """Ends the agent; may be called from any thread."""
    ...


class AgentEnv:
  """Runs an agent on the task's row.

  The reward is what the agent returns (a number, or {'reward', 'metrics', 'given'}; for
  a command its last line if that is such an object), plus what it sent to /feedback,
  plus the grade of the last reply if there is a `grader`. Each running agent takes one
  of `env.<tag>.max_concurrency` threads.

  Args:
    agent: A function, 'package.module:run' or 'file.py:run', with its own options as in
      'file.py:run(rounds=3)'. It is plain or async and receives those of these
      arguments that it names: task (the row, with `episode_seed`), base_url, api_key
      and client (OpenAI's, ready to use).
    command: A program instead, started once per episode, with OPENAI_BASE_URL,
      OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY in its environment and
      the task as JSON on its standard input. It is not run by a shell.
    grader: Graders; see `composite.make_grader`.
    memory_gib: The address space of each of the command's processes; 0 means unlimited.

  Raises:
    ValueError: If an option is wrong.
  """

  played_by_agent = True
  columns: ClassVar = {'given': 'string', 'grader_fault': 'string'}

  def __init__(
    self,
    *,
    agent: Component | None = None,
    command: str = '',
    grader: GraderCalls = (),
    memory_gib: float = 0.0,
  ):
    if bool(agent) == bool(command):
      raise ValueError(
        "set either agent='my_agent.py:run' or command='python my_agent.py', not both"
      )
    if memory_gib < 0:
      raise ValueError('memory_gib must not be negative')
    if memory_gib and agent:
      raise ValueError('memory_gib only has an effect with command=…')
    self._runner: AgentRunner = (
      FunctionAgent(agent) if agent else CommandAgent(_split(command), memory_gib)
    )
    self._grader = make_grader(grader) if grader else None
    self._task: TaskItem = {}
    self._prompt = ''  # what the chat template writes before a reply

  @classmethod
  def check(cls, **options: Any) -> None:
    """Checks the options.

    Raises:
      ValueError: If the agent or the grader cannot be created.
    """
    require_package('aiohttp', 'the endpoint of agents', 'serve')
    cls(**options)

  def reset(
    self, *, seed: int, options: ResetOptions | None = None
  ) -> tuple[str, Info]:
    """Stores the task's row; there is no observation."""
    task = (options or {}).get('task')
    if task is None or task.item is None:
      raise ValueError(
        'the agent environment needs a data set of tasks: set dataset.path'
      )
    self._task = {**task.item, 'episode_seed': seed}
    self._prompt = str((options or {}).get(GENERATION_PROMPT, ''))
    return '', {}

  def run(self, base_url: str, api_key: str) -> AgentResult:
    """Runs the agent and blocks until it is done.

    Args:
      base_url: The URL of the endpoint.
      api_key: The key of the session.

    Returns:
      What the agent returned: reward, metrics, given.

    Raises:
      ValueError: If the agent returned something else. Its own errors are passed on.
    """
    return validate_result(self._runner(self._task, base_url, api_key))

  def judge(self, agent_result: AgentResult, reply: str, feedback: float) -> Info:
    """Computes the episode's reward and info.

    Args:
      agent_result: What `run` returned.
      reply: The last reply of the model.
      feedback: The sum of what the agent sent to /feedback.

    Returns:
      The reward, metrics and columns.
    """
    reward = as_real_number(agent_result.get('reward') or 0.0) or 0.0
    metrics = {'reward/agent': reward, 'reward/feedback': feedback}
    right = str(self._task.get('answer', ''))
    columns = {'given': str(agent_result.get('given') or final_answer(reply, right))}
    total = reward + feedback
    if self._grader is not None:
      grade = self._grader(reply, {GENERATION_PROMPT: self._prompt, **self._task})
      metrics |= grade.metrics
      metrics['accuracy'] = float(next(iter(grade.parts.values())) >= 1)
      columns['grader_fault'] = grade.error
      total += grade.score
    return {
      'reward': total,
      'metrics': metrics | dict(agent_result.get('metrics') or {}),
      'columns': columns,
    }

  def kill(self) -> None:
    """Ends a command and all its processes; a function cannot be ended."""
    self._runner.kill()


def _split(command: str) -> list[str]:
  try:
    parts = shlex.split(command)
  except ValueError as error:
    raise ValueError(f'env_config.command={command!r}: {error}') from error
  if not parts:
    raise ValueError(f'env_config.command={command!r}: must name a program')
  return parts


def validate_result(value: object) -> AgentResult:
  """Validates what an agent returned.

  Args:
    value: Nothing, a number, or a mapping with reward, metrics and given.

  Returns:
    The mapping.

  Raises:
    ValueError: If it is something else.
  """
  if value is None:
    return {}
  result = dict(value) if isinstance(value, Mapping) else {'reward': value}
  if unknown_keys := result.keys() - set(RESULT_KEYS):
    raise unknown_name_error(
      str(min(unknown_keys, key=str)), RESULT_KEYS, 'key', 'agent'
    )
  metrics = result.get('metrics') or {}
  if not isinstance(metrics, Mapping):
    raise ValueError(f'the agent returned metrics {metrics!r}: must be a mapping'[:200])
  for name, value in [('reward', result.get('reward')), *metrics.items()]:
    number = 0.0 if name == 'reward' and value is None else as_real_number(value)
    if number is None or not math.isfinite(number):
      raise ValueError(f'the agent returned {name} {value!r}: must be a number'[:200])
    if name == 'reward' and not is_valid_reward(number):
      raise ValueError(
        f'the agent returned the reward {number}: must be at most ±{MAX_REWARD:g}'[:200]
      )
  return result
