"""Any environment, with tools that the model may call before it answers."""

from collections.abc import Mapping
from typing import Any

from jaxrl.data import tool_calls
from jaxrl.envs import base
from jaxrl.envs.tools.toolbox import WRONG, Toolbox, make_tools
from jaxrl.signature import ConfigError


class ToolUseEnv:
  """Plays `env_type` with `env_config`; replies that call tools are answered by them.

  The model is told of the tools by its own chat template, and of their results by
  messages of the role `tool`, one for each call, in order. What goes wrong with a call
  is told in the same way. A reply without a call goes to the environment.

  tools: a call string, such as 'python(timeout=5) + search(corpus="wiki.jsonl")', see
  `tools.toolbox.make_tools`. max_calls: of an episode. max_calls_per_turn: of a reply.
  max_chars: of a result. seconds: all calls of a reply together. success_reward: for
  a reply whose calls all gave a result. invalid_reward: for one with a call that cannot
  be read, names no tool, has wrong arguments or is one too many. metrics: `tools/…`,
  see `Toolbox.metrics`.
  """

  def __init__(
    self,
    *,
    env_type: str = '',
    env_config: Mapping[str, Any] | None = None,
    tools: str = '',
    max_calls: int = 16,
    max_calls_per_turn: int = 4,
    max_chars: int = 4000,
    seconds: float = 30.0,
    success_reward: float = 0.0,
    invalid_reward: float = 0.0,
  ):
    self._env: Any = _inner(env_type, env_config)()
    self._toolbox = Toolbox(
      make_tools(tools),
      max_calls=max_calls,
      max_calls_per_turn=max_calls_per_turn,
      max_chars=max_chars,
      seconds=seconds,
    )
    self._success_reward, self._invalid_reward = success_reward, invalid_reward

  @staticmethod
  def check(
    *, env_type: str = '', env_config: Any = None, tools: str = '', **limits: Any
  ) -> None:
    """Raises ConfigError for what can be wrong with these before a run starts."""
    _inner(env_type, env_config)
    make_tools(tools)
    for name in ('max_calls', 'max_calls_per_turn', 'max_chars'):
      if limits.get(name, 1) < 1:
        raise ConfigError(f'tool_use: {name} must start at 1, not at {limits[name]}')
    if limits.get('seconds', 1) <= 0:
      raise ConfigError(f'tool_use: seconds must be above 0, not {limits["seconds"]}')

  @staticmethod
  def wraps(
    *, env_type: str = '', env_config: Mapping[str, Any] | None = None, **_: Any
  ) -> tuple[str, Mapping[str, Any]]:
    """The name and the options of the environment inside."""
    return env_type, env_config or {}

  def reset(
    self, *, seed: int, options: Mapping[str, Any] | None = None
  ) -> tuple[base.Observation, dict[str, Any]]:
    observation, info = self._env.reset(seed=seed, options=options)
    if observation is None:
      return None, info
    tools = self._toolbox.start()
    return observation, {**self._noted(info), 'tools': tools}

  def step(
    self, action: str
  ) -> tuple[base.Observation, float, bool, bool, dict[str, Any]]:
    _, calls = tool_calls.parse(action)
    if not calls:
      observation, reward, terminated, truncated, info = self._env.step(action)
      return observation, reward, terminated, truncated, self._noted(info)
    messages, faults = self._toolbox.run(calls)
    reward = 0.0 if faults else self._success_reward
    if not WRONG.isdisjoint(faults):
      reward = self._invalid_reward
    return messages, reward, False, False, self._noted({})

  def _noted(self, info: Mapping[str, Any]) -> dict[str, Any]:
    return {**info, 'metrics': {**info.get('metrics', {}), **self._toolbox.metrics}}

  def kill(self) -> None:
    """Ends what tools and environment have started, calls under way among it."""
    self._toolbox.close()
    end = getattr(self._env, 'kill', None) or getattr(self._env, 'close', None)
    if end is not None:
      end()

  close = kill


def _inner(env_type: str, env_config: Mapping[str, Any] | None) -> Any:
  """What makes the environment inside. Raises ConfigError."""
  if not env_type:
    raise ConfigError("tool_use: option 'env_type' has to name the environment inside")
  if env_type == 'tool_use':
    raise ConfigError('tool_use: name all tools in one string; it is not put in itself')
  if getattr(base.find(env_type), 'played_by_agent', False):
    raise ConfigError(f'tool_use: an agent plays {env_type!r}, with tools of its own')
  return base.factory(env_type, env_config)
