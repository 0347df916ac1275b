"""Environments: Gymnasium's API over text.

`reset(*, seed, options={'task': Task}) -> (observation, info)` and
`step(action) -> (observation, reward, terminated, truncated, info)`. An observation
is text or a list of chat messages; `None` from reset says there is nothing to play.
An action is the model's reply as text. `info` may hold `metrics` (name → number),
`suffix` (text for the turn template) and `columns` (values for dumps). A class whose
tasks are seeds alone says `uses_dataset = False`. One whose options can be wrong in
ways that types do not tell has a `check(**options)`, which raises ConfigError for them
before anything starts. One that gives `columns` names and types them as
`columns = {'given': 'string'}`, so that dumps can have them; see docs/synthesis.md.
One that offers tools gives their schemas as `tools` in the `info` of reset: the chat
template then tells the model of them. A class that wraps another environment says
which by `wraps(**options) -> (name, options)`; see `core`.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jaxrl import signature
from jaxrl.envs.process import ProcessEnv

Observation = str | list[dict[str, Any]] | None

ISOLATED = 'isolated:'
ENVS = {
  'agent': 'jaxrl.envs.agent:AgentEnv',
  'math': 'jaxrl.envs.math:MathEnv',
  'code': 'jaxrl.envs.code:CodeEnv',
  'frozen_lake': 'jaxrl.envs.frozen_lake:FrozenLakeEnv',
  'sokoban': 'jaxrl.envs.sokoban:SokobanEnv',
  'sudoku': 'jaxrl.envs.sudoku:SudokuEnv',
  'countdown': 'jaxrl.envs.countdown:CountdownEnv',
  'web_shop': 'jaxrl.envs.web_shop:WebShopEnv',
  'gymnasium': 'jaxrl.envs.gymnasium:GymnasiumEnv',
  'reasoning_gym': 'jaxrl.envs.reasoning_gym:ReasoningGymEnv',
  'textarena': 'jaxrl.envs.textarena:TextArenaEnv',
  'gem': 'jaxrl.envs.gem:GemEnv',
  'swe': 'jaxrl.envs.swe:SweEnv',
  'terminal_bench': 'jaxrl.envs.terminal_bench:TerminalBenchEnv',
  'tool_use': 'jaxrl.envs.tool_use:ToolUseEnv',
}


class Env(Protocol):
  """One environment. It sees neither tokens nor the cluster, and no global RNG."""

  def reset(
    self, *, seed: int, options: Mapping[str, Any] | None = None
  ) -> tuple[Observation, dict[str, Any]]: ...

  def step(
    self, action: str
  ) -> tuple[Observation, float, bool, bool, dict[str, Any]]: ...


def find(name: str) -> Callable[..., Env]:
  """The class of a known name, of 'package.module:Class', or of 'file.py:Class'.

  Before any of them may stand 'isolated:', see `factory`.
  """
  name = name.removeprefix(ISOLATED)
  if name not in ENVS and ':' not in name:
    raise signature.unknown(name, ENVS, 'environment', 'env_type')
  return signature.resolve(ENVS.get(name, name))


def factory(name: str, options: Mapping[str, Any] | None = None) -> Callable[[], Env]:
  """A function that makes the environment; name and options are checked at once.

  One whose name begins with 'isolated:' has a process of its own, which is killed if
  it hangs, and whose memory is bounded; see `ProcessEnv`.
  """
  options = dict(options or {})
  env = find(name)
  signature.check_options(env, options, f'environment {name!r}')
  check = getattr(env, 'check', None)
  if check is not None:
    check(**options)
  wraps = getattr(env, 'wraps', None)
  if name.startswith(ISOLATED) and wraps and _apart(*wraps(**options)):
    raise signature.ConfigError(
      f'environment {name!r}: {wraps(**options)[0]!r} inside has a process of its own, '
      f'and a process within one is not to be had: leave {ISOLATED!r} out'
    )
  if name.startswith(ISOLATED) and not _apart(name.removeprefix(ISOLATED), options):
    name = name.removeprefix(ISOLATED)
    return lambda: ProcessEnv(ENVS.get(name, name), options)
  return lambda: env(**options)


def _apart(name: str, options: Mapping[str, Any] | None = None) -> bool:
  """Whether it has a process of its own."""
  inside = core(name, options)
  process = isinstance(inside, type) and issubclass(inside, ProcessEnv)
  return process or name.startswith(ISOLATED)


def core(name: str, options: Mapping[str, Any] | None = None) -> Callable[..., Env]:
  """The class that sets the tasks: of one that wraps another, that other's."""
  env = find(name)
  wraps = getattr(env, 'wraps', None)
  return env if wraps is None else core(*wraps(**(options or {})))


def at_split(name: str, options: Mapping[str, Any], split: str) -> dict[str, Any]:
  """`options` for the tasks of `split`, where the environment has such."""
  env, made = find(name), dict(options)
  wraps = getattr(env, 'wraps', None)
  if wraps is not None:
    inner, own = wraps(**options)
    made['env_config'] = at_split(inner, own, split)
  elif 'split' in signature.defaults(env):
    made['split'] = split
  return made
