"""ToolUseEnv adds tools, which the model may call, to any environment."""

from collections.abc import Mapping
from typing import Any

from jaxrl.component_table import Component
from jaxrl.data import tool_formats
from jaxrl.data.tool_formats.tool_format import Tools
from jaxrl.envs import env_registry
from jaxrl.envs.tools.toolbox import INVALID_CALL_KINDS, Toolbox, make_tools
from jaxrl.options import OptionValues


class ToolUseEnv:
  """Plays another environment and answers replies that call tools.

  The model learns of the tools through its own chat template, and of their results
  through messages of the role `tool`, one for each call, in order. What goes wrong with
  a call is reported in the same way. A reply without a call goes to the environment.
  The metrics are `tools/…`; see `Toolbox.metrics`.

  Args:
    env_type: The name of the environment inside.
    env_config: The options of the environment inside.
    tools: The tools, such as 'python(timeout=5) + search(corpus="wiki.jsonl")' in a
      config; see `toolbox.make_tools`.
    max_calls: The maximum number of calls of an episode.
    max_calls_per_turn: The maximum number of calls of a reply.
    max_chars: The maximum number of characters of a result.
    seconds: The time limit for all calls of a reply together.
    success_reward: The reward of a reply whose calls all returned a result.
    invalid_reward: The reward of a reply with a call that cannot be parsed, names no
      tool, has wrong arguments or exceeds a limit.
  """

  def __init__(
    self,
    *,
    env_type: str = '',
    env_config: OptionValues | None = None,
    tools: tuple[Component, ...] = (),
    max_calls: int = 16,
    max_calls_per_turn: int = 4,
    max_chars: int = 4000,
    seconds: float = 30.0,
    success_reward: float = 0.0,
    invalid_reward: float = 0.0,
  ):
    self._env: Any = _inner_factory(env_type, env_config)()
    self._toolbox = Toolbox(
      make_tools(tools),
      max_calls=max_calls,
      max_calls_per_turn=max_calls_per_turn,
      max_chars=max_chars,
      seconds=seconds,
    )
    self._success_reward = success_reward
    self._invalid_reward = invalid_reward
    self._tool_format = tool_formats.UNKNOWN
    self._is_thinking = False  # whether the prompt has opened a thought
    self._tools: Tools = ()

  @staticmethod
  def check(
    *,
    env_type: str = '',
    env_config: Any = None,
    tools: tuple[Component, ...] = (),
    **limits: Any,
  ) -> None:
    """Checks the options before a run starts.

    Raises:
      ValueError: If an option is wrong.
    """
    _inner_factory(env_type, env_config)
    make_tools(tools)
    for name in ('max_calls', 'max_calls_per_turn', 'max_chars'):
      if limits.get(name, 1) < 1:
        raise ValueError(f'{name} must be at least 1, not {limits[name]}')
    if limits.get('seconds', 1) <= 0:
      raise ValueError(f'seconds must be above 0, not {limits["seconds"]}')

  @staticmethod
  def wraps(
    *, env_type: str = '', env_config: OptionValues | None = None, **_: object
  ) -> tuple[str, OptionValues]:
    """Returns the name and options of the environment inside."""
    return env_type, env_config or {}

  def reset(
    self, *, seed: int, options: env_registry.ResetOptions | None = None
  ) -> tuple[env_registry.Observation, env_registry.Info]:
    """Resets the environment inside and starts the tools."""
    told = options or {}
    known = [
      one for one in tool_formats.TOOL_FORMATS if one.name == told.get('tool_format')
    ]
    self._is_thinking = tool_formats.THINK.is_opened_by(
      told.get('generation_prompt', '')
    )
    self._tool_format = known[0] if known else tool_formats.UNKNOWN
    result = self._env.reset(seed=seed, options=options)
    observation, info = env_registry.check_reset_result(self._env, result)
    if observation is None:
      return None, dict(info)
    self._tools = self._toolbox.start()
    return observation, {**self._with_metrics(info), 'tools': self._tools}

  def step(
    self, action: str
  ) -> tuple[env_registry.Observation, float, bool, bool, env_registry.Info]:
    """Runs the reply's tool calls, or passes the reply to the environment inside."""
    _, reply = tool_formats.split_thought(action, opened=self._is_thinking)
    _, calls = self._tool_format.parse(reply, self._tools)
    if not calls:
      result = env_registry.check_step_result(self._env, self._env.step(action))
      return *result[:-1], self._with_metrics(result[-1])
    messages, errors = self._toolbox.run(calls)
    reward = 0.0 if errors else self._success_reward
    if not INVALID_CALL_KINDS.isdisjoint(errors):
      reward = self._invalid_reward
    return messages, reward, False, False, self._with_metrics({})

  def _with_metrics(self, info: Mapping[str, Any]) -> env_registry.Info:
    return {**info, 'metrics': {**info.get('metrics', {}), **self._toolbox.metrics}}

  def kill(self) -> None:
    """Ends everything that tools and environment started, even running calls."""
    self._toolbox.close()
    end_env = getattr(self._env, 'kill', None) or getattr(self._env, 'close', None)
    if end_env is not None:
      end_env()

  close = kill


def _inner_factory(env_type: str, env_config: OptionValues | None) -> Any:
  """Returns the factory of the environment inside. Raises ValueError."""
  if not env_type:
    raise ValueError("option 'env_type' must name the environment inside")
  if env_type == 'tool_use':
    raise ValueError('it cannot wrap itself; name all tools in one string')
  if getattr(env_registry.find_env(env_type), 'played_by_agent', False):
    raise ValueError(
      f'{env_type!r} is played by an agent, which has its own '
      'tools, so it cannot be wrapped'
    )
  return env_registry.env_factory(env_type, env_config)
