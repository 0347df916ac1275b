"""MultiPlayerEnvManager plays environments in which several players move in turn.

Each player has a conversation of its own, so none sees what only another was shown. An
environment with players has Gymnasium's API, as every other, and beside it:
- `num_players`, an attribute of its class: how many there are, at most `MAX_ROLES`;
- `role` in the `info` of `reset` and of `step`: the player who moves next, from 0, and
  is shown the observation; who it was, where it is left out;
- `rewards` in the `info` of `step`, by role: what others than the one who has moved
  earn, whose reward is that of the step.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl.data.seeds import fold_seed
from jaxrl.envs.env_registry import (
  Observation,
  as_real_number,
  check_step_result,
  is_valid_reward,
)
from jaxrl.rollout.engine.actor_proxy import maybe_await
from jaxrl.rollout.env_manager import EnvContext, EnvManager
from jaxrl.rollout.episodes.rollout_cache import RolloutCache
from jaxrl.rollout.opponents import Opponent
from jaxrl.rollout.queue.group_state import EpisodeLease
from jaxrl.rollout.rewards.reward_pipeline import RewardPipeline
from jaxrl.rollout.thread_pool import CallTimeoutError, ThreadPool
from jaxrl.types import PLAYER_KEY, Completion, Message, Trajectory


@dataclasses.dataclass
class PlayerCache(RolloutCache):
  """Holds what one player of an episode was shown and replied.

  Attributes:
    role: The player.
    is_trained: Whether the policy plays it.
    num_earlier_turns: Turns of all players before the one that is being played.
    game_turns: For each of its turns, how many of all players' came before.
    owed: What it earned before its first turn.
    total: What it earned.
  """

  role: int = 0
  is_trained: bool = True
  num_earlier_turns: int = 0
  game_turns: list[int] = dataclasses.field(default_factory=list)
  owed: float = 0.0
  total: float = 0.0

  @property
  def turn_number(self) -> int:
    """The number of the next turn, of all players' together."""
    return self.num_earlier_turns

  def append_response(self, completion: Completion) -> None:
    """Appends a reply as a new turn, which is paid what the player is owed."""
    super().append_response(completion)
    self.game_turns.append(self.num_earlier_turns)
    self.turns[-1].reward, self.owed = self.owed, 0.0

  def earn(self, reward: float) -> None:
    """Rewards the player's last turn; before there is one, its first."""
    self.total += reward
    if self.turns:
      self.turns[-1].reward += reward
    else:
      self.owed += reward


@dataclasses.dataclass
class GameCache(RolloutCache):
  """Holds an episode of several players; its tokens are those of the first prompt.

  Attributes:
    players: Each player's conversation, by role.
    role: The player who moves next.
    num_turns: Turns of all players.
  """

  players: list[PlayerCache] = dataclasses.field(default_factory=list)
  role: int = 0
  num_turns: int = 0

  @property
  def player(self) -> PlayerCache:
    """The conversation of the player who moves next."""
    return self.players[self.role]

  @property
  def trained_players(self) -> list[PlayerCache]:
    """The players of the policy that have moved."""
    return [player for player in self.players if player.is_trained and player.turns]

  def take_failure(self, player: PlayerCache) -> None:
    """Ends the game as a player's conversation has ended."""
    self.truncate(player.stop_reason, player.extras.pop('error', ''))

  def check_rewards(self) -> None:
    """Makes the episode a failure if a player's rewards are too large."""
    for player in self.players:
      player.check_rewards()
      if player.stop_reason == 'reward_failed' and not self.failed:
        self.take_failure(player)


class PlayerRewards(RewardPipeline):
  """Adds rewards to each player's conversation by itself.

  Args:
    pipeline: The rewards.
  """

  def __init__(self, pipeline: RewardPipeline):
    super().__init__(pipeline.terms, pipeline.env_weight)

  async def apply(
    self, cache: RolloutCache, name: str, seed: int, pool: ThreadPool
  ) -> None:
    """Rewards the players of a finished game; see `RewardPipeline.apply`."""
    if cache.failed or not isinstance(cache, GameCache):
      return
    for player in cache.trained_players:
      role = player.role
      await super().apply(player, f'{name}/{role}', fold_seed(seed, role), pool)
      if player.failed and not cache.failed:
        cache.take_failure(player)


class MultiPlayerEnvManager(EnvManager):
  """Plays an environment of several players, one after another.

  The options are those of `EnvManager`, where `max_steps` limits the turns of all
  players together, and `max_length` the tokens of each one's conversation. Templates
  and tools are the same for all; what only one player is told, its observation says.

  Every player of the policy gives rows of its own, with its role as `extras['role']`
  and its own rewards. `turn` is the number of a row's first turn among all players'.
  Metrics: `reward/role_N`, what each player earned from the environment.
  """

  def __init__(
    self, context: EnvContext, group_id: int = 0, env_id: int = 0, **options: Any
  ):
    """Creates a manager; see `EnvManager`.

    Args:
      context: What all environments of the tag share; its `players` say who plays.
      group_id: The env group.
      env_id: The environment within the env group.
      **options: Options of `EnvManager`.
    """
    players = context.players
    assert players is not None, 'the context does not say who plays'
    if context.rewards is not None:
      context = dataclasses.replace(context, rewards=PlayerRewards(context.rewards))
    super().__init__(context, group_id, env_id, **options)
    self._players = players

  async def reset(self, lease: EpisodeLease) -> RolloutCache | None:
    """Draws the task, starts the environment, and lets opponents move who begin."""
    cache = await super().reset(lease)
    if cache is None:
      return None
    game = GameCache(**vars(cache))
    if game.done:
      return game
    game.role = game.extras.pop('role', 0)
    if game.role >= self._players.count:
      self._discard_env()
      game.truncate('env_reset_failed', self._describe_role(game.role))
      return game
    game.players = [self._make_player(game, i) for i in range(self._players.count)]
    if not self._is_trial:
      await self._play_opponents(game)
    return game

  def _make_player(self, game: GameCache, role: int) -> PlayerCache:
    is_trained = role in self._players.trained_roles(game.seed)
    player = PlayerCache(
      lease=game.lease,
      seed=game.seed,
      task=game.task,
      env=game.env,
      chat=game.chat,
      generation_prompt=game.generation_prompt,
      extras=dict(game.extras),
      role=role,
      is_trained=is_trained,
    )
    if role == game.role:
      player.append_observation(game.tokens)
      player.messages, player.images = list(game.messages), list(game.images)
      player.state_hash = game.state_hash
    return player

  async def make_decision(self, cache: RolloutCache) -> Completion | None:
    """Generates the reply of the player who moves next; see `EnvManager`."""
    assert isinstance(cache, GameCache)
    player = cache.player
    num_turns = len(player.turns)
    completion = await super().make_decision(player)
    cache.num_turns += len(player.turns) - num_turns
    if player.done:
      cache.take_failure(player)
    return completion

  async def step(self, cache: RolloutCache, completion: Completion) -> None:
    """Passes a reply to the environment, then lets opponents move; see `EnvManager`."""
    assert isinstance(cache, GameCache)
    text = self.context.chat.decode(completion.tokens)
    await self._move(cache, text)
    await self._play_opponents(cache)

  async def _play_opponents(self, game: GameCache) -> None:
    """Lets opponents move until it is the policy's turn, or the game has ended."""
    opponent = self._players.opponent
    while not game.done and not game.player.is_trained:
      assert opponent is not None, 'the policy plays every role'
      player, lease = game.player, game.lease
      seed = fold_seed(
        self._base_seed, game.seed, lease.sample_index, game.num_turns, 'opponent'
      )
      try:
        reply = await self._run_on_thread(
          _reply, opponent, list(player.messages), player.role, seed,
          timeout=self._timeouts.step,
        )  # fmt: skip
        text = await maybe_await(reply)
        if not isinstance(text, str):
          raise TypeError(f'an opponent replied {type(text).__name__}, not a text')
      except CallTimeoutError as error:
        self._discard_env()
        game.truncate('env_timeout', error)
      except Exception as error:
        self._discard_env()
        game.truncate('env_error', error)
      else:
        game.num_turns += 1
        await self._move(game, text)

  async def _move(self, game: GameCache, text: str) -> None:
    """Passes a player's reply to the environment, and shows the next one the result."""
    try:
      tokens = await self._run_on_thread(
        self._move_env, game, text, timeout=self._timeouts.step
      )
    except CallTimeoutError as error:
      self._discard_env()
      game.truncate('env_timeout', error)
    except Exception as error:
      self._discard_env()
      game.truncate('env_error', error)
    else:
      if not game.done:
        num_tokens_left = self.max_length - len(game.player.tokens)
        game.player.append_observation(tokens[:num_tokens_left])

  def _move_env(self, game: GameCache, text: str) -> list[int]:
    """Steps the environment; returns the ids of what the next player is shown."""
    result = game.env.step(text)
    observation, reward, terminated, truncated, info = check_step_result(
      game.env, result
    )
    game.player.messages.append({'role': 'assistant', 'content': text})
    game.player.earn(reward)
    self._record_info(game, info)
    next_role = game.extras.pop('role', game.role)
    for role, other_reward in info.get('rewards', {}).items():
      self._check_reward(game, role, other_reward)
      game.players[role].earn(float(other_reward))
    if next_role >= len(game.players):
      raise ValueError(self._describe_role(next_role))
    game.role = next_role
    if terminated:
      game.terminated = True
    elif truncated or game.num_turns >= self.max_steps:
      game.truncate('max_steps')
    if game.done:
      return []
    game.player.num_earlier_turns = game.num_turns
    return self._show(game.player, observation, info)

  def _show(
    self, player: PlayerCache, observation: Observation, info: Mapping[str, object]
  ) -> list[int]:
    """Adds an observation to a player's conversation, and returns its ids."""
    encode: Callable[..., list[int]] = _encode_nothing  # an opponent reads the text
    if player.is_trained:
      encode = player.chat.encode_prompt
    if player.is_trained and player.turns:
      reply = player.tokens[player.turns[-1].start : player.turns[-1].stop]

      def encode_next(messages: Sequence[Message], **options: object) -> list[int]:
        return player.chat.encode_next_prompt(messages, reply=reply, **options)

      encode = encode_next
    return self._encode_observation(player, observation, info, encode)

  def _describe_role(self, role: int) -> str:
    count = self._players.count
    return f"info['role'] is {role}, but there are {count} players, numbered from 0"

  def _check_reward(self, game: GameCache, role: object, reward: object) -> None:
    """Checks one of `info['rewards']`."""
    if role not in range(len(game.players)) or role == game.role:
      raise ValueError(
        f"info['rewards'] has {role!r}; it must have roles below {len(game.players)}, "
        'but for the one who has moved, whose reward is that of the step'
      )
    number = as_real_number(reward)
    if number is None or not is_valid_reward(number):
      raise ValueError(f"info['rewards'] has {reward!r:.80}; it must be finite numbers")

  def formulate_rollouts(self, cache: RolloutCache) -> list[Trajectory]:
    """Turns a finished episode into rows of each of the policy's players.

    Args:
      cache: The finished episode.

    Returns:
      The rows in the order of their turns; one without actions if the policy had none.
    """
    players = cache.trained_players if isinstance(cache, GameCache) else []
    if not isinstance(cache, GameCache) or not players:
      return super().formulate_rollouts(cache)
    turns = [turn for player in players for turn in player.turns]
    cache.metrics |= {
      'turns': float(cache.num_turns),
      'response_length': float(sum(turn.stop - turn.start for turn in turns)),
      **{f'reward/role_{player.role}': player.total for player in cache.players},
    }
    rows = []
    for player in players:
      player.stop_reason = cache.stop_reason
      player.metrics |= cache.metrics
      player.columns |= cache.columns
      player.extras |= cache.extras | {'role': player.role, PLAYER_KEY: player.role}
      for row in super().formulate_rollouts(player):
        row.turn = player.game_turns[row.turn]
        rows.append(row)
    return sorted(rows, key=lambda row: row.turn)


def _reply(opponent: Opponent, messages: list[Message], role: int, seed: int) -> Any:
  return opponent.reply(messages, role=role, seed=seed)


def _encode_nothing(messages: Sequence[Message], **options: object) -> list[int]:
  return []
