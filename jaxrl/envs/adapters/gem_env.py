"""GemEnv plays the environments of GEM, each in its own process.

See https://github.com/axon-rl/gem. Its games draw from the process-wide random numbers,
so only a process that plays nothing else can repeat a game by its seed.
"""

import importlib
from typing import Any

from jaxrl.envs.env_registry import Info, ResetOptions
from jaxrl.envs.isolated_env import IsolatedEnv
from jaxrl.options import OptionValues, closest_match, require_package


class GemEnv(IsolatedEnv):
  r"""Plays one GEM environment; the seed determines everything.

  The whole reply is passed on: GEM's games look for `\boxed{…}` in it.

  Args:
    id: The environment's id, such as game:Wordle-v0-easy.
    arguments: The environment's own options.
    max_chars: The maximum number of characters of a reply; the game does not see the
      rest.
    unsafe: Also allow environments outside the family `game:`. They fetch data when
      they are created, and some run the model's answer as a program.

  Raises:
    ValueError: If the package is missing or the id is missing or unsafe.
  """

  uses_dataset = False  # its tasks are seeds

  def __init__(
    self,
    *,
    id: str = '',
    arguments: OptionValues | None = None,
    max_chars: int = 20_000,
    unsafe: bool = False,
  ):
    require_package('gem', "the environment 'gem'", 'envs')
    if not id:
      raise ValueError("option 'id' must name an environment")
    if not unsafe and not id.startswith('game:'):
      raise ValueError(
        f'{id!r} is not a game: it downloads data and may run what the '
        'model writes. Set unsafe=True to allow that'
      )
    options = {'id': id, 'arguments': dict(arguments or {}), 'max_chars': max_chars}
    super().__init__('jaxrl.envs.adapters.gem_env:GemGame', options)


class GemGame:
  """Runs the environment inside that process and seeds the process's random numbers.

  Args:
    id: The environment's id.
    arguments: The environment's own options.
    max_chars: The maximum number of characters of a reply.

  Raises:
    ValueError: If there is no such environment.
  """

  def __init__(self, *, id: str, arguments: OptionValues, max_chars: int):
    importlib.import_module('gem.envs')  # registers them
    registration: Any = importlib.import_module('gem.envs.registration')
    known = registration.ENV_REGISTRY
    if id not in known:
      suggestion = closest_match(id, known)
      hint = f' Did you mean {suggestion!r}?' if suggestion else ''
      raise ValueError(f'no environment {id!r}.{hint}')
    self._make = registration.make
    self._id = id
    self._arguments = dict(arguments)
    self._max_chars = max_chars
    self._seeding: Any = importlib.import_module('gem.utils.seeding')
    self._game: Any = None
    self._score = 0.0

  def reset(
    self, *, seed: int, options: ResetOptions | None = None
  ) -> tuple[str, Info]:
    """Creates the game of `seed`."""
    seed %= 2**32  # the range of numpy's legacy seeds
    self._seeding.set_seed(seed)  # some draw when they are made
    self._game = self._make(self._id, **self._arguments)
    self._score = 0.0
    observation, info = self._game.reset(seed=seed)
    return str(observation), self._info(info)

  def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
    """Plays a reply."""
    if self._game is None:
      raise RuntimeError('call reset before step')
    observation, reward, terminated, truncated, info = self._game.step(
      action[: self._max_chars]
    )
    self._score += float(reward)
    game_info = self._info(info)
    success = float(bool(terminated) and float(reward) >= 1)
    game_info['metrics'] = {
      'score': self._score,
      'success': success,
      'accuracy': success,
    }
    return str(observation), float(reward), bool(terminated), bool(truncated), game_info

  @staticmethod
  def _info(info: Info) -> Info:
    suffix = info.get('suffix')
    return {} if suffix is None else {'suffix': str(suffix)}
