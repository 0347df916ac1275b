"""GymnasiumEnv plays any Gymnasium environment in text.

Observations of a text space are shown as they are, others by the environment's own text
rendering ('ansi'), else as numbers. Actions are those of a text space or of a discrete
one, by name or by number.
"""

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import load_env_creator

from jaxrl.envs import reply_parsing
from jaxrl.envs.env_registry import Info, ResetOptions
from jaxrl.options import OptionValues

_COLOURS = 'gray red green yellow blue magenta cyan white crimson'.split()
_COLOURED = re.compile(r'\x1b\[[34](\d)[\d;]*m(.*?)\x1b\[0m', re.DOTALL)


class GymnasiumEnv:
  """Plays one environment made by `gymnasium.make(id, **arguments)`.

  It is seeded by its own reset, as usual in Gymnasium.

  Args:
    id: The environment's id, optionally with a module to import: 'module:id'.
    arguments: The environment's own options.
    actions: Names of a discrete space's actions, in order and regardless of case; by
      default their numbers.
    rules: A text before the first observation.
    show: 'render' shows the text rendering, 'observation' the observation itself,
      'auto' the first of them that is text, else the observation.
    invalid_reward: The reward of a reply that is not an action; it costs its turn and
      the environment does not move.
    max_chars: The maximum number of characters of an action.

  Raises:
    ValueError: If the environment cannot be created, its actions cannot be named, or
      `show` is unknown.
  """

  uses_dataset = False  # its tasks are seeds

  def __init__(
    self,
    *,
    id: str = '',
    arguments: OptionValues | None = None,
    actions: Sequence[str] = (),
    rules: str = '',
    show: str = 'auto',
    invalid_reward: float = 0.0,
    max_chars: int = 2000,
  ):
    if show not in ('auto', 'render', 'observation'):
      raise ValueError(f'show must be auto, render or observation, not {show!r}')
    self._env, self._renders = _make(id, dict(arguments or {}), show)
    self._action_names = _action_names(self._env.action_space, actions, id)
    self._rules = rules
    self._invalid_reward = invalid_reward
    self._max_chars = max_chars
    self._observation_text = ''
    self._num_invalid = 0
    self._started = False

  @property
  def help(self) -> str:
    """Returns how to answer."""
    space = self._env.action_space
    if isinstance(space, spaces.Text):
      max_chars = min(self._max_chars, space.max_length)
      return f'Answer with {space.min_length} to {max_chars} characters.'
    return f'Answer with one of: {", ".join(self._action_names)}.'

  @classmethod
  def check(cls, **options: Any) -> None:
    """Checks the options.

    Raises:
      ValueError: If the environment cannot be created or its actions cannot be named.
    """
    cls(**options)

  def reset(
    self, *, seed: int, options: ResetOptions | None = None
  ) -> tuple[str, Info]:
    """Resets the environment."""
    observation, _ = self._env.reset(seed=seed)
    self._observation_text = self._render(observation)
    self._num_invalid = 0
    self._started = True
    text = (
      f'{self._rules}\n{self._observation_text}'
      if self._rules
      else self._observation_text
    )
    return text, {'suffix': self.help}

  def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
    """Plays the action that the reply names."""
    if not self._started:
      raise RuntimeError('call reset before step')
    env_action = self._parse_action(action)
    if env_action is None:
      self._num_invalid += 1
      text = f'{self.help}\n{self._observation_text}'
      return text, self._invalid_reward, False, False, self._info()
    observation, reward, terminated, truncated, _ = self._env.step(env_action)
    self._observation_text = self._render(observation)
    return (
      self._observation_text,
      float(reward),
      bool(terminated),
      bool(truncated),
      self._info(),
    )

  def _info(self) -> Info:
    metrics = {'invalid_actions': float(self._num_invalid)}
    return {'suffix': self.help, 'metrics': metrics}

  def _parse_action(self, reply: str) -> Any:
    """Returns the action that a reply names, or None."""
    text = reply_parsing.tagged_answer(reply)
    space = self._env.action_space
    if len(text) > self._max_chars:
      return None
    if isinstance(space, spaces.Text):
      return text if space.contains(text) else None
    mentioned = [name for name in self._action_names if _last_mention(text, name)]
    if not mentioned:
      return None
    chosen = max(mentioned, key=lambda name: (_last_mention(text, name), len(name)))
    return int(space.start) + self._action_names.index(chosen)

  def _render(self, observation: object) -> str:
    if self._renders:
      observation = self._env.render()
    return describe_colors(observation_text(observation)).strip('\n')


def _last_mention(text: str, name: str) -> int:
  """Returns where the last mention of a name as a separate word ends; 0 if nowhere."""
  pattern = rf'(?<![\w-]){re.escape(name)}(?!\w)'
  return max((m.end() for m in re.finditer(pattern, text, re.IGNORECASE)), default=0)


def _make(id: str, arguments: OptionValues, show: str) -> tuple[Any, bool]:
  """Returns the environment, and whether it is shown by its rendering."""
  if not id:
    raise ValueError("option 'id' must name an environment")
  module, _, name = id.rpartition(':')
  try:
    if module:
      importlib.import_module(module)
    spec = gymnasium.spec(name)
  except (gymnasium.error.Error, ImportError) as error:
    raise ValueError(f'no environment {id!r}: {error}') from error
  maker = spec.entry_point
  if isinstance(maker, str):
    maker = load_env_creator(maker)
  has_text_rendering = 'ansi' in getattr(maker, 'metadata', {}).get('render_modes', ())
  if show == 'render' and not has_text_rendering:
    raise ValueError(f'{id!r} has no text rendering; use show=observation')
  if has_text_rendering and show != 'observation':
    arguments = {'render_mode': 'ansi', **arguments}
  env = gymnasium.make(spec, **arguments)
  shows_observation = show == 'auto' and isinstance(env.observation_space, spaces.Text)
  return env, env.render_mode == 'ansi' and not shows_observation


def _action_names(space: object, actions: Sequence[str], id: str) -> list[str]:
  """Returns the names of a discrete space's actions; none for a text space."""
  if isinstance(space, spaces.Text) and not actions:
    return []
  if not isinstance(space, spaces.Discrete):
    raise ValueError(
      f'{id!r} takes actions of {space}; only text and discrete actions can '
      'be written, and only discrete ones can be named'
    )
  first, count = int(space.start), int(space.n)
  names = list(actions) or [str(first + i) for i in range(count)]
  if len(names) != count or len({name.lower() for name in names}) != count:
    raise ValueError(
      f'{id!r} has {count} actions; option actions must give each a unique '
      f'name, not {names}'
    )
  return names


def describe_colors(text: str) -> str:
  """Replaces a terminal's colours by words: a red S becomes [red S].

  The colours carry meaning: FrozenLake marks the player's position by nothing else.

  Args:
    text: The text with escape sequences.

  Returns:
    The plain text.
  """

  def named(match: re.Match[str]) -> str:
    return f'[{_COLOURS[min(int(match.group(1)), 8)]} {match.group(2)}]'

  return _COLOURED.sub(named, text)


def observation_text(observation: object) -> str:
  """Formats an observation as text, with three significant digits per number.

  Args:
    observation: The observation.

  Returns:
    The text.
  """
  if isinstance(observation, Mapping):
    return '\n'.join(
      f'{key}: {observation_text(part)}' for key, part in observation.items()
    )
  if isinstance(observation, tuple):
    return ', '.join(observation_text(part) for part in observation)
  if isinstance(observation, np.ndarray) and observation.ndim:
    return np.array2string(observation, precision=3, separator=', ')
  if isinstance(observation, float | np.floating):
    return f'{float(observation):.3g}'
  return str(observation)
