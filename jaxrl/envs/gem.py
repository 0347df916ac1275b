"""Environments of GEM, each played in a process of its own.

https://github.com/axon-rl/gem. Its games draw from the process-wide random numbers, so
that only a process that plays nothing else can repeat one by its seed.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

from jaxrl import signature
from jaxrl.envs.process import ProcessEnv


class GemEnv(ProcessEnv):
  r"""One of them by its `id`, such as game:Wordle-v0-easy; the seed decides all.

  arguments: its own. max_chars: of a reply; the rest is not seen by the game. The whole
  reply is played: GEM's games look for `\boxed{…}` in it. unsafe: also those which are
  not of the family `game:`; these fetch data when they are made, and some run the
  model's answer as a program.
  """

  uses_dataset = False  # its tasks are seeds

  def __init__(
    self,
    *,
    id: str = '',
    arguments: Mapping[str, Any] | None = None,
    max_chars: int = 20_000,
    unsafe: bool = False,
  ):
    if importlib.util.find_spec('gem') is None:
      raise signature.ConfigError(
        "the environment 'gem' needs its package: pip install 'jaxrl[envs]'"
      )
    if not id:
      raise signature.ConfigError("gem: option 'id' has to name an environment")
    if not unsafe and not id.startswith('game:'):
      raise signature.ConfigError(
        f'gem: {id!r} is not a game: it fetches data, and may run what the model '
        'writes; unsafe=True plays it all the same'
      )
    options = {'id': id, 'arguments': dict(arguments or {}), 'max_chars': max_chars}
    super().__init__('jaxrl.envs.gem:Game', options)

  @classmethod
  def check(cls, **options: Any) -> None:
    """Raises ConfigError for a missing package, a missing name, and what is unsafe."""
    cls(**options)


class Game:
  """The environment inside that process. Seeds the process's own random numbers."""

  def __init__(self, *, id: str, arguments: Mapping[str, Any], max_chars: int):
    importlib.import_module('gem.envs')  # registers them
    registration: Any = importlib.import_module('gem.envs.registration')
    known = registration.ENV_REGISTRY
    if id not in known:
      guess = signature.nearest(id, known)
      hint = f' Did you mean {guess!r}?' if guess else ''
      raise signature.ConfigError(f'gem: no environment {id!r}.{hint}')
    self._make, self._id = registration.make, id
    self._arguments, self._max_chars = dict(arguments), max_chars
    self._seeding: Any = importlib.import_module('gem.utils.seeding')
    self._game: Any = None
    self._score = 0.0

  def reset(
    self, *, seed: int, options: Mapping[str, Any] | None = None
  ) -> tuple[str, dict[str, Any]]:
    seed %= 2**32  # as numpy's own has it
    self._seeding.set_seed(seed)  # some draw when they are made
    self._game = self._make(self._id, **self._arguments)
    self._score = 0.0
    shown, info = self._game.reset(seed=seed)
    return str(shown), self._info(info)

  def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    if self._game is None:
      raise RuntimeError('call reset before step')
    shown, reward, ended, cut, info = self._game.step(action[: self._max_chars])
    self._score += float(reward)
    found = self._info(info)
    success = float(bool(ended) and float(reward) >= 1)
    found['metrics'] = {'score': self._score, 'success': success, 'accuracy': success}
    return str(shown), float(reward), bool(ended), bool(cut), found

  @staticmethod
  def _info(info: Mapping[str, Any]) -> dict[str, Any]:
    suffix = info.get('suffix')
    return {} if suffix is None else {'suffix': str(suffix)}
