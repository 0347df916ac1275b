"""TextArenaEnv plays one-player games of TextArena, each in its own process.

See https://github.com/LeonGuertler/TextArena. Its games draw from the process-wide
random numbers, so only a process that plays nothing else can repeat a game by its seed.
A game that iterates over sets of words only repeats if PYTHONHASHSEED is set too.
"""

import importlib
from typing import Any

from jaxrl.envs import reply_parsing
from jaxrl.envs.env_registry import Info, ResetOptions
from jaxrl.envs.isolated_env import IsolatedEnv
from jaxrl.options import OptionValues, closest_match, require_package


class TextArenaEnv(IsolatedEnv):
  """Plays one game; everything that happens follows from the seed.

  The reward is the game's, at its end. What a reply says within `<answer>` tags, or on
  its last line, is played as it is: most games want square brackets. A move that the
  game itself finds invalid twice in a row loses the game. Some games fetch word lists
  when first played.

  Args:
    id: The game's id, such as GuessTheNumber-v0.
    arguments: The game's own options.
    invalid_reward: The reward of an answer that is too long.
    max_chars: The maximum number of characters of an answer; a longer one is not played
      and costs its turn.

  Raises:
    ValueError: If the package or the id is missing.
  """

  uses_dataset = False  # its tasks are seeds

  def __init__(
    self,
    *,
    id: str = '',
    arguments: OptionValues | None = None,
    invalid_reward: float = 0.0,
    max_chars: int = 2000,
  ):
    require_package('textarena', "the environment 'textarena'", 'envs')
    if not id:
      raise ValueError("option 'id' must name a game")
    options = {'id': id, 'arguments': dict(arguments or {})}
    options |= {'invalid_reward': invalid_reward, 'max_chars': max_chars}
    super().__init__('jaxrl.envs.adapters.textarena_env:TextArenaGame', options)


class TextArenaGame:
  """Runs the game inside that process and seeds the process's random numbers.

  Args:
    id: The game's id.
    arguments: The game's own options.
    invalid_reward: The reward of an answer that is too long.
    max_chars: The maximum number of characters of an answer.

  Raises:
    ValueError: If there is no such game.
  """

  def __init__(
    self,
    *,
    id: str,
    arguments: OptionValues,
    invalid_reward: float,
    max_chars: int,
  ):
    self._package: Any = importlib.import_module('textarena')
    known = self._package.envs.registration.ENV_REGISTRY
    if id not in known:
      suggestion = closest_match(id, known)
      hint = f' Did you mean {suggestion!r}?' if suggestion else ''
      raise ValueError(f'no game {id!r}.{hint}')
    self._id = id
    self._game_id = f'{id}-raw' if f'{id}-raw' in known else id  # without wrappers
    self._arguments = dict(arguments)
    self._invalid_reward = invalid_reward
    self._max_chars = max_chars
    self._game: Any = None
    self._num_invalid = 0

  def reset(
    self, *, seed: int, options: ResetOptions | None = None
  ) -> tuple[str, Info]:
    """Creates the game of `seed`."""
    self._num_invalid = 0
    self._package.State(1, seed=seed)  # seeds; some games draw before they do so
    try:
      self._game = self._package.make(self._game_id, **self._arguments)
      self._game.reset(num_players=1, seed=seed)
    except AssertionError as error:
      raise ValueError(
        f'{self._id!r} cannot be played by one player: {error}'
      ) from error
    return self._new_messages(), {}

  def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
    """Plays the reply's answer."""
    if self._game is None:
      raise RuntimeError('call reset before step')
    text = reply_parsing.tagged_answer(action)
    if len(text) > self._max_chars:
      self._num_invalid += 1
      observation = f'An answer has at most {self._max_chars} characters.'
      return observation, self._invalid_reward, False, False, self._info(0.0)
    done, _ = self._game.step(action=text)
    observation, reward = self._new_messages(), 0.0
    if done:
      rewards, roles = self._game.close()
      reward = float((rewards or {}).get(0, 0.0))
      self._num_invalid += bool(roles[0].get('invalid_move'))
      observation = '\n'.join(
        filter(None, (observation, str(roles[0].get('reason') or '')))
      )
    return observation, reward, bool(done), False, self._info(reward)

  def _new_messages(self) -> str:
    """Returns what the game has said since the last call, except for our own words."""
    kinds = self._package.ObservationType
    _, messages = self._game.get_observation()
    self._num_invalid += sum(kind == kinds.GAME_ADMIN for _, _, kind in messages)
    texts = (text for _, text, kind in messages if kind != kinds.PLAYER_ACTION)
    return '\n'.join(texts)

  def _info(self, reward: float) -> Info:
    metrics = {'score': reward, 'success': float(reward >= 1)}
    metrics['accuracy'] = metrics['success']
    return {'metrics': {**metrics, 'invalid_actions': float(self._num_invalid)}}
