"""Env is Gymnasium's API over text; the registry finds environments by short name.

`reset(*, seed, options={'task': Task}) -> (observation, info)` and `step(action) ->
(observation, reward, terminated, truncated, info)`. An observation is text, a list of
chat messages, or a list of parts of a message's content, such as `{'type': 'image',
'image': …}` with what `jaxrl.data.images.as_image` takes; `None` from reset means that
there is nothing left to play. An action is the model's reply as text. `info` may hold
`metrics` (name → number), `suffix` (text for the turn template) and `columns` (values
for dumps).

An environment class may define the following:
- `uses_dataset = False`, if its tasks are defined by seeds alone.
- `not_replayable = 'plays against people'`, if the same seed and replies need not lead
  to the same state: why its episodes cannot be replayed.
- `check(**options)`, which raises ConfigError for options that are wrong in ways that
  types do not show, before anything starts.
- `columns = {'given': 'string'}`, which names and types the `columns` of its info so
  that dumps can have them; see docs/synthesis.md.
- `num_players = 2`, if several players move in turn; see
  `jaxrl.rollout.multi_player_env_manager`.
- `evaluation_metrics(metrics) -> metrics`, a static method: what follows from the
  metrics of an evaluation, by name.
- `wraps(**options) -> (name, options)`, if it wraps another environment; see
  `unwrapped`.
- `apply_solution() -> reply` and `empty_reply`, if its tasks can be checked; see
  `CheckableEnv`.

An environment that offers tools returns their schemas as `tools` in the `info` of
reset; the chat template then announces them to the model.
"""

import contextlib
import contextvars
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from jaxrl.options import (
  ConfigError,
  Keywords,
  OptionValues,
  check_callable,
  check_options,
  defaults,
  error_prefix,
  unknown_name_error,
)
from jaxrl.user_code import import_object

MessageParts = list[dict[str, Any]]  # messages, or parts of the content of one
Observation = str | MessageParts | None
Info = dict[str, Any]  # what is told beside an observation; see above
ResetOptions = Mapping[str, Any]  # may hold the `Task` to play as `task`
STEP_RESULT = '(observation, reward, terminated, truncated, info)'
# Advantages are computed in float32, in which the square of a larger reward overflows.
MAX_REWARD = 1e18

ISOLATED_PREFIX = 'isolated:'
ENVS = {
  'agent': 'jaxrl.envs.agents.agent_env:AgentEnv',
  'math': 'jaxrl.envs.math_env:MathEnv',
  'code': 'jaxrl.envs.coding.code_env:CodeEnv',
  'frozen_lake': 'jaxrl.envs.games.frozen_lake_env:FrozenLakeEnv',
  'sokoban': 'jaxrl.envs.games.sokoban_env:SokobanEnv',
  'sudoku': 'jaxrl.envs.games.sudoku_env:SudokuEnv',
  'countdown': 'jaxrl.envs.games.countdown_env:CountdownEnv',
  'kuhn_poker': 'jaxrl.envs.games.kuhn_poker_env:KuhnPokerEnv',
  'web_shop': 'jaxrl.envs.games.web_shop_env:WebShopEnv',
  'picture_quiz': 'jaxrl.envs.games.picture_quiz_env:PictureQuizEnv',
  'gymnasium': 'jaxrl.envs.adapters.gymnasium_env:GymnasiumEnv',
  'reasoning_gym': 'jaxrl.envs.adapters.reasoning_gym_env:ReasoningGymEnv',
  'textarena': 'jaxrl.envs.adapters.textarena_env:TextArenaEnv',
  'gem': 'jaxrl.envs.adapters.gem_env:GemEnv',
  'verifiers': 'jaxrl.envs.adapters.verifiers_env:VerifiersEnv',
  'openenv': 'jaxrl.envs.adapters.openenv_env:OpenEnvEnv',
  'swe': 'jaxrl.envs.terminal.swe_env:SweEnv',
  'terminal_bench': 'jaxrl.envs.terminal.terminal_bench_env:TerminalBenchEnv',
  'tool_use': 'jaxrl.envs.tool_use_env:ToolUseEnv',
}
_own_envs: contextvars.ContextVar[Mapping[str, str]] = contextvars.ContextVar(
  'own_envs', default=types.MappingProxyType({})
)


class Env(Protocol):
  """Protocol of an environment; it sees no tokens, no cluster and no global RNG."""

  def reset(
    self, *, seed: int, options: ResetOptions | None = None
  ) -> tuple[Observation, Info]:
    """Starts an episode.

    Args:
      seed: The episode's seed, which determines everything random.
      options: May hold the dataset's row as `task`.

    Returns:
      The first observation (None if there is nothing to play) and the info.
    """
    ...

  def step(self, action: str) -> tuple[Observation, float, bool, bool, Info]:
    """Plays a reply.

    Args:
      action: The model's reply.

    Returns:
      A tuple (observation, reward, terminated, truncated, info).
    """
    ...


class CheckableEnv(Env, Protocol):
  """Protocol of an environment whose tasks `launch.rollout --check` can check.

  Attributes:
    empty_reply: A reply that ends the episode with nothing done.
  """

  empty_reply: str

  def apply_solution(self) -> str | None:
    """Carries out the reference solution of the task that `reset` prepared.

    A task that is done in several parts has one for each: it is called again after each
    reply that does not end the episode.

    Returns:
      The reply that hands in the solution; None if the task has none.
    """
    ...


def find_env(name: str) -> Callable[..., Env]:
  """Returns the class of an environment.

  Args:
    name: A name of ENVS, 'package.module:Class' or 'file.py:Class', optionally prefixed
      by 'isolated:'; see `env_factory`.

  Returns:
    The class, or another callable that builds the environment.

  Raises:
    ConfigError: If there is no such environment.
  """
  name = name.removeprefix(ISOLATED_PREFIX)
  known = {**ENVS, **_own_envs.get()}
  if name not in known and ':' not in name:
    raise unknown_name_error(name, known, 'environment', 'env_type')
  where = f'env_type={name!r}'
  env = import_object(known.get(name, name), where)
  wanted = 'a class with the methods reset and step, or a function that returns one'
  check_callable(env, where, wanted=wanted)
  return env


@contextlib.contextmanager
def naming(locations: Mapping[str, str]) -> Iterator[None]:
  """Lets `find_env` find further environments by name while a config is built.

  Args:
    locations: Where each is, by name.
  """
  token = _own_envs.set(locations)
  try:
    yield
  finally:
    _own_envs.reset(token)


def env_factory(name: str, options: OptionValues | None = None) -> Callable[[], Env]:
  """Returns a function that builds an environment, after checking its options.

  An environment whose name begins with 'isolated:' runs in its own process, which is
  killed if it hangs and whose memory is bounded; see `IsolatedEnv`.

  Args:
    name: The name of the environment; see `find_env`.
    options: The environment's options.

  Returns:
    A function without arguments.

  Raises:
    ConfigError: If the name or an option is wrong.
  """
  options, where = dict(options or {}), f'environment {name!r}'
  env = find_env(name)
  check_options(env, options, where)
  check = getattr(env, 'check', None)
  if check is not None:
    with error_prefix(where):
      check(**options)
  wraps = getattr(env, 'wraps', None)
  if name.startswith(ISOLATED_PREFIX) and wraps and _is_isolated(*wraps(**options)):
    raise ConfigError(
      f'environment {name!r}: {wraps(**options)[0]!r} inside already runs in its own '
      f'process, and such processes cannot be nested: leave {ISOLATED_PREFIX!r} out'
    )
  if name.startswith(ISOLATED_PREFIX) and not _is_isolated(
    name.removeprefix(ISOLATED_PREFIX), options
  ):
    from jaxrl.envs.isolated_env import IsolatedEnv  # few environments need it

    name = name.removeprefix(ISOLATED_PREFIX)
    return lambda: IsolatedEnv(ENVS.get(name, name), options)

  def make_env() -> Env:
    with error_prefix(where):
      return env(**options)

  return make_env


def _is_isolated(name: str, options: OptionValues | None = None) -> bool:
  """Returns whether an environment runs in its own process."""
  from jaxrl.envs.isolated_env import IsolatedEnv  # few environments need it

  innermost = unwrapped(name, options)
  is_isolated_class = isinstance(innermost, type) and issubclass(innermost, IsolatedEnv)
  return is_isolated_class or name.startswith(ISOLATED_PREFIX)


def unwrapped(name: str, options: OptionValues | None = None) -> Callable[..., Env]:
  """Returns the class that defines the tasks: the innermost of wrapped environments.

  Args:
    name: The name of the environment.
    options: The environment's options.

  Returns:
    The class.
  """
  return find_env(innermost(name, options)[0])


def innermost(
  name: str, options: OptionValues | None = None
) -> tuple[str, OptionValues]:
  """Returns the name and options of the innermost of wrapped environments.

  Args:
    name: The name of the environment.
    options: The environment's options.
  """
  wraps = getattr(find_env(name), 'wraps', None)
  if wraps is None:
    return name, options or {}
  return innermost(*wraps(**(options or {})))


def uses_dataset(name: str, options: OptionValues) -> bool:
  """Returns whether an environment takes its tasks from rows, not from seeds.

  Args:
    name: The name of the environment.
    options: The environment's options.
  """
  return getattr(unwrapped(name, options), 'uses_dataset', True)


def num_players(name: str, options: OptionValues) -> int:
  """Returns how many players move in an environment.

  Args:
    name: The name of the environment.
    options: The environment's options.
  """
  return getattr(unwrapped(name, options), 'num_players', 1)


def options_for_split(name: str, options: OptionValues, split: str) -> Keywords:
  """Returns `options` changed to draw the tasks of `split`, where there are splits.

  Args:
    name: The name of the environment.
    options: The environment's options.
    split: The split, such as 'test'.

  Returns:
    The changed options.
  """
  env, changed = find_env(name), dict(options)
  wraps = getattr(env, 'wraps', None)
  if wraps is not None:
    inner, inner_options = wraps(**options)
    changed['env_config'] = options_for_split(inner, inner_options, split)
  elif 'split' in defaults(env):
    changed['split'] = split
  return changed


def is_valid_reward(reward: float) -> bool:
  """Returns whether a reward can be trained on.

  Args:
    reward: A number.

  Returns:
    False if it is NaN, or larger than `MAX_REWARD` in absolute value.
  """
  return bool(abs(reward) <= MAX_REWARD)


def as_real_number(value: Any) -> float | None:
  """Returns a real scalar of any kind as a float.

  Args:
    value: A bool, int, float, fraction or decimal, or a scalar or array without
      dimensions of numpy, JAX or torch.

  Returns:
    The number, which may be NaN or infinite; None for anything else, such as a text, a
    complex number or an array with dimensions.
  """
  if hasattr(value, 'shape') and tuple(value.shape) == () and hasattr(value, 'item'):
    value = value.item()
  if isinstance(value, str | bytes | bytearray | complex) or hasattr(value, 'shape'):
    return None
  if not hasattr(value, '__float__') and not hasattr(value, '__index__'):
    return None
  try:
    return float(value)
  except (TypeError, ValueError, OverflowError):
    return None


def cut_observation(observation: object, max_chars: int) -> Any:
  """Leaves out what a text or chat messages hold beyond so many characters.

  Args:
    observation: An observation; anything but texts and messages is left as it is.
    max_chars: The characters that are kept, of all messages together.

  Returns:
    The observation itself if nothing was left out.
  """
  if isinstance(observation, str):
    return observation[:max_chars]  # the same object if it is not longer
  if not isinstance(observation, list):
    return observation
  parts, num_left, is_cut = [], max_chars, False
  for part in observation:
    key = 'content' if isinstance(part, dict) and 'content' in part else 'text'
    value = part.get(key) if isinstance(part, dict) else None
    kept = cut_observation(value, num_left)
    is_cut = is_cut or kept is not value
    parts.append({**part, key: kept} if kept is not value else part)
    num_left -= _num_chars(kept)
  return parts if is_cut else observation


def _num_chars(content: object) -> int:
  if isinstance(content, list):
    return sum(_num_chars(p.get('text')) for p in content if isinstance(p, dict))
  return len(content) if isinstance(content, str) else 0


class EnvResultError(TypeError):
  """A method of an environment returned something that cannot be used."""


def check_reset_result(
  env: object, result: object
) -> tuple[Observation, Mapping[str, Any]]:
  """Returns the observation and the info of a `reset`.

  Args:
    env: The environment.
    result: What its `reset` returned.

  Raises:
    EnvResultError: If that is not a pair of an observation and a mapping.
  """
  if not isinstance(result, tuple) or len(result) != 2:
    raise _result_error(env, 'reset', _shape(result), 'return (observation, info)')
  observation, info = result
  if observation is None and info is None:  # how ROLL's environments end their data
    return None, {}
  if observation is not None:
    _check_observation(env, 'reset', observation)
  _check_info(env, 'reset', info)
  return result


def check_step_result(
  env: object, result: object
) -> tuple[Observation, float, bool, bool, Mapping[str, Any]]:
  """Returns the five parts of what a `step` returned.

  Args:
    env: The environment.
    result: What its `step` returned.

  Raises:
    EnvResultError: If it has another shape, or the reward is not finite or too large to
      train on.
  """
  if not isinstance(result, tuple) or len(result) != 5:
    raise _result_error(env, 'step', _shape(result), f'return {STEP_RESULT}')
  observation, reward, *flags, info = result
  number = as_real_number(reward)
  if number is None:
    raise _result_error(env, 'step', f'the reward {reward!r:.80}', 'be a number')
  if not is_valid_reward(number):
    raise _result_error(
      env,
      'step',
      f'the reward {number}',
      f'be a finite number of at most ±{MAX_REWARD:g}',
    )
  _check_info(env, 'step', info)
  for name, flag in zip(('terminated', 'truncated'), flags, strict=True):
    if not _is_flag(flag):
      raise _result_error(env, 'step', f'{name}={flag!r:.80}', 'be True or False')
  if not any(flags):  # that of a finished episode is not read
    _check_observation(env, 'step', observation)
  terminated, truncated = map(bool, flags)
  return observation, number, terminated, truncated, info


def _is_flag(value: Any) -> bool:
  """Returns whether a value is a bool or an int, also one of numpy or JAX."""
  is_scalar = getattr(value, 'shape', None) == () and value.dtype.kind in 'biu'
  return isinstance(value, (bool, int)) or is_scalar


def _check_observation(env: object, method: str, observation: object) -> None:
  wanted = 'be a text, a list of messages, or a list of parts of a message'
  if not isinstance(observation, (str, list, tuple)):
    raise _result_error(env, method, f'{_shape(observation)} as observation', wanted)
  for part in observation if not isinstance(observation, str) else ():
    if not isinstance(part, Mapping):
      what = f'{_shape(observation)} with {_shape(part)} as observation'
      raise _result_error(env, method, what, wanted)


def _check_info(env: object, method: str, info: object) -> None:
  if not isinstance(info, Mapping):
    raise _result_error(env, method, f'{_shape(info)} as info', 'be a dict')


def _result_error(env: object, method: str, what: str, wanted: str) -> EnvResultError:
  """Returns an error with the file and line where the method is defined.

  Args:
    env: The environment.
    method: The name of the method.
    what: What it returned.
    wanted: What that must do or be.
  """
  env_class = getattr(env, 'isolated_class', None) or type(env)
  value = ' '.join(what.split())  # an array's text has several lines
  text = f'{env_class.__name__}.{method} returned {value}; it must {wanted}'
  function = inspect.unwrap(getattr(env_class, method, None))  # pyright: ignore
  code = getattr(function, '__code__', None)
  place = f' ({code.co_filename}, line {code.co_firstlineno})' if code else ''
  return EnvResultError(text + place)


def _shape(value: object) -> str:
  if isinstance(value, tuple):
    return f'a tuple of {len(value)}'
  name = type(value).__name__
  return f'{"an" if name[0] in "aeiou" else "a"} {name}'
