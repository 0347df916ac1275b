"""Any environment of Gymnasium, played in text.

Observations of a text space are shown as they are, others by the environment's own
text rendering ('ansi'), else as numbers. Actions are those of a text space or of a
discrete one, by name or by number.
"""

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import load_env_creator

from jaxrl.envs import replies
from jaxrl.signature import ConfigError

_COLOURS = 'gray red green yellow blue magenta cyan white crimson'.split()
_COLOURED = re.compile(r'\x1b\[[34](\d)[\d;]*m(.*?)\x1b\[0m', re.DOTALL)


class GymnasiumEnv:
  """One environment made by `gymnasium.make(id, **arguments)`.

  actions: names of a discrete space's actions, in order, case aside; by default their
  numbers. rules: text before the first observation. show: 'render' for the text
  rendering, 'observation' for the observation itself, 'auto' for the first of them
  that is text, else the observation. invalid_reward: for a reply that is no action; it
  costs its turn and the environment does not move. max_chars: of an action.

  It is seeded by its own reset, as Gymnasium has it.
  """

  uses_dataset = False  # its tasks are seeds

  def __init__(
    self,
    *,
    id: str = '',
    arguments: Mapping[str, Any] | None = None,
    actions: Sequence[str] = (),
    rules: str = '',
    show: str = 'auto',
    invalid_reward: float = 0.0,
    max_chars: int = 2000,
  ):
    if show not in ('auto', 'render', 'observation'):
      raise ValueError(f'show is auto, render or observation, not {show!r}')
    self._env, self._renders = _make(id, dict(arguments or {}), show)
    self._names = _names(self._env.action_space, actions, id)
    self._rules, self._invalid_reward = rules, invalid_reward
    self._max_chars = max_chars
    self._seen, self._invalid, self._started = '', 0, False

  @property
  def help(self) -> str:
    space = self._env.action_space
    if isinstance(space, spaces.Text):
      most = min(self._max_chars, space.max_length)
      return f'Answer with {space.min_length} to {most} characters.'
    return f'Answer with one of: {", ".join(self._names)}.'

  @classmethod
  def check(cls, **options: Any) -> None:
    """Raises ConfigError for an environment that cannot be made or said."""
    cls(**options)

  def reset(
    self, *, seed: int, options: Mapping[str, Any] | None = None
  ) -> tuple[str, dict[str, Any]]:
    observation, _ = self._env.reset(seed=seed)
    self._seen, self._invalid, self._started = self._shown(observation), 0, True
    shown = f'{self._rules}\n{self._seen}' if self._rules else self._seen
    return shown, {'suffix': self.help}

  def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    if not self._started:
      raise RuntimeError('call reset before step')
    chosen = self._read(action)
    if chosen is None:
      self._invalid += 1
      shown = f'{self.help}\n{self._seen}'
      return shown, self._invalid_reward, False, False, self._info()
    observation, reward, terminated, truncated, _ = self._env.step(chosen)
    self._seen = self._shown(observation)
    return self._seen, float(reward), bool(terminated), bool(truncated), self._info()

  def _info(self) -> dict[str, Any]:
    metrics = {'invalid_actions': float(self._invalid)}
    return {'suffix': self.help, 'metrics': metrics}

  def _read(self, reply: str) -> Any:
    """The action that a reply says; None if it says none."""
    text = replies.answer(reply)
    space = self._env.action_space
    if len(text) > self._max_chars:
      return None
    if isinstance(space, spaces.Text):
      return text if space.contains(text) else None
    words = [name for name in self._names if _says(text, name)]
    if not words:
      return None
    last = max(words, key=lambda name: (_says(text, name), len(name)))
    return int(space.start) + self._names.index(last)

  def _shown(self, observation: Any) -> str:
    if self._renders:
      observation = self._env.render()
    return uncoloured(as_text(observation)).strip('\n')


def _says(text: str, name: str) -> int:
  """Where the last mention of a name ends, as a word of its own; 0 if nowhere."""
  pattern = rf'(?<![\w-]){re.escape(name)}(?!\w)'
  return max((m.end() for m in re.finditer(pattern, text, re.IGNORECASE)), default=0)


def _make(id: str, arguments: dict[str, Any], show: str) -> tuple[Any, bool]:
  """The environment, and whether it is shown by its rendering."""
  if not id:
    raise ConfigError("gymnasium: option 'id' has to name an environment")
  module, _, name = id.rpartition(':')
  try:
    if module:
      importlib.import_module(module)
    spec = gymnasium.spec(name)
  except (gymnasium.error.Error, ImportError) as error:
    raise ConfigError(f'gymnasium: no environment {id!r}: {error}') from error
  maker = spec.entry_point
  if isinstance(maker, str):
    maker = load_env_creator(maker)
  drawn = 'ansi' in getattr(maker, 'metadata', {}).get('render_modes', ())
  if show == 'render' and not drawn:
    raise ConfigError(f'gymnasium: {id!r} has no text rendering; use show=observation')
  if drawn and show != 'observation':
    arguments = {'render_mode': 'ansi', **arguments}
  env = gymnasium.make(spec, **arguments)
  said = show == 'auto' and isinstance(env.observation_space, spaces.Text)
  return env, env.render_mode == 'ansi' and not said


def _names(space: Any, actions: Sequence[str], id: str) -> list[str]:
  """The names of a discrete space's actions; none for a text space."""
  if isinstance(space, spaces.Text) and not actions:
    return []
  if not isinstance(space, spaces.Discrete):
    raise ConfigError(
      f'gymnasium: {id!r} takes actions of {space}; only text and discrete ones can be '
      'said, and only discrete ones be named'
    )
  first, count = int(space.start), int(space.n)
  names = list(actions) or [str(first + i) for i in range(count)]
  if len(names) != count or len({name.lower() for name in names}) != count:
    raise ConfigError(
      f'gymnasium: {id!r} has {count} actions; option actions has to give each a name '
      f'of its own, not {names}'
    )
  return names


def uncoloured(text: str) -> str:
  """Text with a terminal's colours in words: a red S as [red S].

  They mean something: FrozenLake marks where the player stands by nothing else.
  """

  def named(match: re.Match[str]) -> str:
    return f'[{_COLOURS[min(int(match.group(1)), 8)]} {match.group(2)}]'

  return _COLOURED.sub(named, text)


def as_text(observation: Any) -> str:
  """An observation in words and numbers, three digits each."""
  if isinstance(observation, Mapping):
    return '\n'.join(f'{key}: {as_text(part)}' for key, part in observation.items())
  if isinstance(observation, tuple):
    return ', '.join(as_text(part) for part in observation)
  if isinstance(observation, np.ndarray) and observation.ndim:
    return np.array2string(observation, precision=3, separator=', ')
  if isinstance(observation, float | np.floating):
    return f'{float(observation):.3g}'
  return str(observation)
