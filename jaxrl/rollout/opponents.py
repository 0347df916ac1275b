"""Opponents play roles of an environment of several players in the policy's place."""

import dataclasses
import uuid
from collections.abc import Callable
from typing import Any, Protocol

from jaxrl.component_calls import ComponentCall
from jaxrl.component_table import ComponentTable
from jaxrl.data.seeds import fold_seed
from jaxrl.options import Options, error_prefix, option
from jaxrl.rollout.engine.actor_proxy import maybe_await
from jaxrl.types import MAX_ROLES, Message


@dataclasses.dataclass(frozen=True)
class OpponentOptions(Options):
  """Who plays the roles of an environment of several players."""

  opponent: ComponentCall | None = option(
    None,
    'Who plays the roles of an environment of several players that the policy does '
    "not: a program, as 'random(replies=…)' or a class of your own, or a model, as "
    "'model(checkpoint=…)'; '' lets the policy play them all.",
  )
  policy_role: int | None = option(
    None,
    'The role that the policy plays against an opponent, from 0; none for another one '
    'from group to group.',
    low=0,
  )


class Opponent(Protocol):
  """Protocol of who plays in the policy's place, and is not trained."""

  def reply(self, messages: list[Message], *, role: int, seed: int) -> Any:
    """Returns the player's next reply.

    Args:
      messages: The player's own conversation, which ends with what it is shown.
      role: The player.
      seed: Randomness of the reply.

    Returns:
      The text, or an awaitable of it.
    """
    ...


class RandomOpponent:
  """Draws each reply from a list, each as likely as the others.

  Args:
    replies: The replies, separated by commas.

  Raises:
    ValueError: If there are none.
  """

  def __init__(self, *, replies: str = ''):
    self._replies = [text.strip() for text in replies.split(',') if text.strip()]
    if not self._replies:
      raise ValueError("replies='…' must list what may be said, separated by commas")

  def reply(self, messages: list[Message], *, role: int, seed: int) -> str:
    """Draws a reply."""
    return self._replies[fold_seed(seed, 'reply') % len(self._replies)]


class ModelOpponent:
  """Replies as a language model of fixed weights does.

  Args:
    client: Asks the model, as `jaxrl.rollout.rewards.judge_clients` do.
    temperature: Sampling temperature; 0 is greedy.
    max_tokens: A reply is cut at this many tokens.

  Raises:
    ValueError: If an option is out of range.
  """

  def __init__(self, client: Any, *, temperature: float = 1.0, max_tokens: int = 256):
    if temperature < 0 or max_tokens < 1:
      raise ValueError(
        f'temperature must be at least 0, not {temperature}, and max_tokens at least '
        f'1, not {max_tokens}'
      )
    self._client = client
    self._sampling = {'temperature': temperature, 'max_tokens': max_tokens}

  async def reply(self, messages: list[Message], *, role: int, seed: int) -> str:
    """Asks the model."""
    name = f'opponent/{uuid.uuid4().hex}'  # unique among all workers of the run
    asked = self._client.ask(name, messages, seed=seed, **self._sampling)
    return await maybe_await(asked)


OPPONENTS = ComponentTable[Callable[..., Opponent]](
  'opponent',
  'env.TAG.opponent',
  {'random': RandomOpponent},
)


def make_opponent(opponent: Any, where: str) -> Opponent:
  """Makes an opponent that is played by a program.

  Args:
    opponent: Its name or location, and its options; or the opponent itself.
    where: What error messages begin with, such as the config key.

  Raises:
    ValueError: If there is none, or it has no method `reply`.
  """
  if isinstance(opponent, ModelOpponent):
    return opponent
  made = OPPONENTS.build(opponent, where=where)
  with error_prefix(where):
    if not callable(getattr(made, 'reply', None)):
      name = type(made).__name__
      raise ValueError(f'{name} has no method reply(messages, *, role, seed)')
  return made


@dataclasses.dataclass(frozen=True)
class PlayerOptions:
  """Says who plays an environment of several players.

  Attributes:
    count: The players.
    opponent: Who plays those that the policy does not; None if it plays them all.
    policy_role: Whom the policy plays against an opponent; None for another one from
      group to group, as the episode's seed says.
  """

  count: int
  opponent: Opponent | None = None
  policy_role: int | None = None

  def trained_roles(self, seed: int) -> list[int]:
    """Returns whom the policy plays in an episode.

    Args:
      seed: The episode's seed.
    """
    if self.opponent is None:
      return list(range(self.count))
    return [seed % self.count if self.policy_role is None else self.policy_role]


def check_players(
  name: str,
  num_players: object,
  opponent: object = None,
  policy_role: int | None = None,
) -> None:
  """Checks who is to play an environment.

  Args:
    name: The environment.
    num_players: What its class says.
    opponent: The opponent, or None.
    policy_role: Whom the policy plays, or None.

  Raises:
    ValueError: If they do not go together.
  """
  if type(num_players) is not int or not 1 <= num_players <= MAX_ROLES:
    raise ValueError(
      f'{name}: its num_players is {num_players!r}; it must be 1 to {MAX_ROLES}'
    )
  if num_players == 1 and opponent is not None:
    raise ValueError(
      f'opponent={opponent}: has no effect here: {name} has one player (num_players of '
      'its class): leave it out'
    )
  if policy_role is None:
    return
  if opponent is None:
    raise ValueError(
      f'policy_role={policy_role}: has no effect here: the policy plays every role: '
      'set opponent, or leave policy_role out'
    )
  if policy_role >= num_players:
    raise ValueError(
      f'policy_role={policy_role}: {name} has {num_players} players, from 0: set at '
      f'most {num_players - 1}'
    )
