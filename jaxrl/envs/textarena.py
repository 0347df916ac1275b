"""Games of one player from TextArena, each played in a process of its own.

https://github.com/LeonGuertler/TextArena. Its games draw from the process-wide random
numbers, so that only a process that plays nothing else can repeat one by its seed. A
game that goes through sets of words repeats where PYTHONHASHSEED is set, too.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

from jaxrl import signature
from jaxrl.envs import replies
from jaxrl.envs.process import ProcessEnv


class TextArenaEnv(ProcessEnv):
  """One game by its `id`, such as GuessTheNumber-v0; what happens follows the seed.

  arguments: the game's own. max_chars: a longer answer is not played; it costs its
  turn and `invalid_reward`. What else is invalid the game itself says, and it ends
  with a loss when that happens twice in a row. The reward is the game's, at its end.
  What a reply says within `<answer>` tags, or on its last line, is played as it is:
  most games want square brackets. Some games fetch word lists when first played.
  """

  uses_dataset = False  # its tasks are seeds

  def __init__(
    self,
    *,
    id: str = '',
    arguments: Mapping[str, Any] | None = None,
    invalid_reward: float = 0.0,
    max_chars: int = 2000,
  ):
    if importlib.util.find_spec('textarena') is None:
      raise signature.ConfigError(
        "the environment 'textarena' needs its package: pip install -e '.[envs]'"
      )
    if not id:
      raise signature.ConfigError("textarena: option 'id' has to name a game")
    options = {'id': id, 'arguments': dict(arguments or {})}
    options |= {'invalid_reward': invalid_reward, 'max_chars': max_chars}
    super().__init__('jaxrl.envs.textarena:Game', options)

  @classmethod
  def check(cls, **options: Any) -> None:
    """Raises ConfigError for a missing package or name."""
    cls(**options)


class Game:
  """The game inside that process. Seeds the process's own random numbers."""

  def __init__(
    self,
    *,
    id: str,
    arguments: Mapping[str, Any],
    invalid_reward: float,
    max_chars: int,
  ):
    self._package: Any = importlib.import_module('textarena')
    known = self._package.envs.registration.ENV_REGISTRY
    if id not in known:
      guess = signature.nearest(id, known)
      hint = f' Did you mean {guess!r}?' if guess else ''
      raise signature.ConfigError(f'textarena: no game {id!r}.{hint}')
    self._id = id
    self._raw = f'{id}-raw' if f'{id}-raw' in known else id  # without wrappers
    self._arguments = dict(arguments)
    self._invalid_reward, self._max_chars = invalid_reward, max_chars
    self._game: Any = None
    self._invalid = 0

  def reset(
    self, *, seed: int, options: Mapping[str, Any] | None = None
  ) -> tuple[str, dict[str, Any]]:
    self._invalid = 0
    self._package.State(1, seed=seed)  # seeds; some games draw before they do so
    try:
      self._game = self._package.make(self._raw, **self._arguments)
      self._game.reset(num_players=1, seed=seed)
    except AssertionError as error:
      raise signature.ConfigError(
        f'textarena: {self._id!r} cannot be played by one player: {error}'
      ) from error
    return self._seen(), {}

  def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    if self._game is None:
      raise RuntimeError('call reset before step')
    text = replies.answer(action)
    if len(text) > self._max_chars:
      self._invalid += 1
      shown = f'An answer has at most {self._max_chars} characters.'
      return shown, self._invalid_reward, False, False, self._info(0.0)
    done, _ = self._game.step(action=text)
    shown, reward = self._seen(), 0.0
    if done:
      rewards, roles = self._game.close()
      reward = float((rewards or {}).get(0, 0.0))
      self._invalid += bool(roles[0].get('invalid_move'))
      shown = '\n'.join(filter(None, (shown, str(roles[0].get('reason') or ''))))
    return shown, reward, bool(done), False, self._info(reward)

  def _seen(self) -> str:
    """What the game has said since it was last asked; the player's own words not."""
    kinds = self._package.ObservationType
    _, messages = self._game.get_observation()
    self._invalid += sum(kind == kinds.GAME_ADMIN for _, _, kind in messages)
    said = (text for _, text, kind in messages if kind != kinds.PLAYER_ACTION)
    return '\n'.join(said)

  def _info(self, reward: float) -> dict[str, Any]:
    metrics = {'score': reward, 'success': float(reward >= 1)}
    metrics['accuracy'] = metrics['success']
    return {'metrics': {**metrics, 'invalid_actions': float(self._invalid)}}
