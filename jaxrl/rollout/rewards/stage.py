"""The stage between an episode's end and its group's filter: what else it is worth.

Its parts may wait for engines and servers, so they run as coroutines beside other
episodes. A part gives a score or says why there is none; a score is never made up.
"""

import asyncio
import dataclasses
import json
import math
from collections.abc import Awaitable, Mapping
from typing import Any, Protocol

from jaxrl.data.seeds import fold
from jaxrl.envs.graders import rules
from jaxrl.envs.graders.processes import GraderFault
from jaxrl.rollout.call_pool import CallPool
from jaxrl.rollout.episode import RolloutCache
from jaxrl.types import Message

TEXT = 2000  # characters kept of what a part said, for people


class NoScore(RuntimeError):
  """There is no score; the message says why."""


@dataclasses.dataclass(frozen=True)
class Played:
  """A finished episode, as a part sees it.

  messages: the conversation. item: the data set's row, empty for a game. seed: differs
  between episodes, members and parts. name: of the attempt, unlike any other's. pool:
  runs what may block.
  """

  messages: list[Message]
  item: Mapping[str, Any]
  seed: int
  name: str
  pool: CallPool

  @property
  def reply(self) -> str:
    """What the model wrote last."""
    said = [m for m in self.messages if m['role'] == 'assistant']
    return _content(said[-1]) if said else ''

  @property
  def question(self) -> str:
    """The item's question; without one what the user said before the first reply."""
    if self.item.get('question') is not None:
      return str(self.item['question'])
    roles = [m['role'] for m in self.messages]
    end = roles.index('assistant') if 'assistant' in roles else len(roles)
    asked = [_content(m) for m in self.messages[:end] if m['role'] != 'system']
    return '\n'.join(asked)

  @property
  def conversation(self) -> str:
    """All of it as text."""
    return '\n\n'.join(f'{m["role"]}: {_content(m)}' for m in self.messages)


def _content(message: Message) -> str:
  """What a message says, the tools that it calls included."""
  calls = message.get('tool_calls')
  said = [str(message.get('content') or ''), json.dumps(calls) if calls else '']
  return '\n'.join(filter(None, said))


@dataclasses.dataclass(frozen=True)
class Word:
  """What a part says. score: before its weight; None for none, `fault` says why.

  metrics: more numbers, by name. said: text for people.
  """

  score: float | None
  fault: str = ''
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
  said: str = ''


class Part(Protocol):
  """One term of the sum. What it raises is a fault, too."""

  async def __call__(self, played: Played) -> Word: ...


@dataclasses.dataclass(frozen=True)
class Rule:
  """A grader as a part. What gets it stuck is the reply's fault, and counts as 0."""

  grade: rules.Part

  async def __call__(self, played: Played) -> Word:
    try:
      return Word(await played.pool.run(self.grade, played.reply, played.item))
    except GraderFault as fault:
      return Word(0.0, str(fault))


@dataclasses.dataclass(frozen=True)
class Term:
  """weight · part. otherwise: the score in place of one that is missing; with None the
  attempt has failed.
  """

  part: Part
  weight: float = 1.0
  otherwise: float | None = None


@dataclasses.dataclass(frozen=True)
class Rewards:
  """Σ weight · part, added to the reward of an episode's last turn. Can be pickled.

  env: the weight of what the environment itself gave, at every turn.
  """

  terms: Mapping[str, Term]
  env: float = 1.0

  async def add(
    self, cache: RolloutCache, name: str, seed: int, pool: CallPool
  ) -> None:
    """Rewards a finished episode; one that has failed, or has no turn, is left alone.

    Metrics: reward/<part>, its score; reward/<part>/faults, 1 where it had none;
    reward/env, the environment's own. Where a score is missing and nothing stands in
    for it, the episode ends as `reward_failed`, unfit for training.
    """
    if cache.failed or not cache.turns:
      return
    item = cache.task.item if cache.task is not None else None

    def asked(part: str, term: Term) -> Awaitable[Word]:
      own = Played(cache.messages, item or {}, fold(seed, part), name, pool)
      return _word(term.part, own)

    words = await asyncio.gather(*(asked(*term) for term in self.terms.items()))
    cache.metrics['reward/env'] = sum(turn.reward for turn in cache.turns)
    total, missing = 0.0, []
    for (part, term), word in zip(self.terms.items(), words, strict=True):
      score = term.otherwise if word.score is None else word.score
      own = {f'{part}/{key}': value for key, value in word.metrics.items()}
      own[f'{part}/faults'] = float(bool(word.fault))
      if score is None:
        missing.append(f'{part}: {word.fault}')
      else:
        own[part] = score
        total += term.weight * score
      cache.metrics.update({f'reward/{key}': value for key, value in own.items()})
      if told := word.said or word.fault:
        cache.extras.setdefault('rewards', {})[part] = told[-TEXT:]
    if missing:
      cache.stop('reward_failed', '; '.join(missing))
      return
    for turn in cache.turns:
      turn.reward *= self.env
    cache.turns[-1].reward += total


async def _word(part: Part, played: Played) -> Word:
  try:
    word = await part(played)
  except Exception as error:
    return Word(None, f'{type(error).__name__}: {error}')
  if word.score is not None and not math.isfinite(word.score):
    return dataclasses.replace(word, score=None, fault=f'its score is {word.score}')
  return word
