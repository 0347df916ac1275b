"""The reward pipeline adds weighted reward terms to an episode after its end.

Reward functions may wait for engines and servers, so they run as coroutines next to
other episodes. A function returns a score or says why there is none; a score is never
made up.
"""

import asyncio
import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Protocol

from jaxrl.data.chat_tokenizer import has_images
from jaxrl.data.seeds import fold_seed
from jaxrl.envs.env_registry import MAX_REWARD, as_real_number, is_valid_reward
from jaxrl.envs.graders import rule_graders
from jaxrl.envs.graders.grader_processes import GraderFailure
from jaxrl.rollout.episodes.rollout_cache import RolloutCache
from jaxrl.rollout.thread_pool import ThreadPool
from jaxrl.types import MAX_REWARD_TERMS, Message
from jaxrl.user_code import describe_error

MAX_TEXT_CHARS = 2000  # characters kept of a reward function's text


class ScoringError(RuntimeError):
  """A score could not be obtained; the message says why."""


@dataclasses.dataclass(frozen=True)
class RewardInput:
  """Shows a finished episode to a reward function.

  Attributes:
    messages: The conversation.
    item: The data set's item; empty for a game.
    seed: Differs between episodes, samples and reward functions.
    name: Names the attempt uniquely.
    pool: Runs calls that may block.
  """

  messages: list[Message]
  item: Mapping[str, Any]
  seed: int
  name: str
  pool: ThreadPool

  @property
  def reply(self) -> str:
    """Returns the last message that the model wrote; '' if it wrote none."""
    replies = [m for m in self.messages if m['role'] == 'assistant']
    return _message_text(replies[-1]) if replies else ''

  @property
  def question(self) -> str:
    """Returns the item's question, or else the user's text before the first reply."""
    if self.item.get('question') is not None:
      return str(self.item['question'])
    roles = [m['role'] for m in self.messages]
    end = roles.index('assistant') if 'assistant' in roles else len(roles)
    prompts = [_message_text(m) for m in self.messages[:end] if m['role'] != 'system']
    return '\n'.join(prompts)

  @property
  def conversation(self) -> str:
    """Returns the whole conversation as text."""
    return '\n\n'.join(f'{m["role"]}: {_message_text(m)}' for m in self.messages)


def _message_text(message: Message) -> str:
  """Returns a message's content, followed by its tool calls."""
  calls, content = message.get('tool_calls'), message.get('content') or ''
  if has_images([message]):  # which graders of text do not see
    pieces = [str(part.get('text', '[image]')) for part in message['content']]
    content = ''.join(pieces)
  parts = [str(content), json.dumps(calls) if calls else '']
  return '\n'.join(filter(None, parts))


@dataclasses.dataclass(frozen=True)
class RewardOutput:
  """Holds what a reward function returns.

  Attributes:
    score: The score before its weight; None if there is none.
    error: Why there is no score, or what went wrong.
    metrics: More numbers, by name.
    text: Text for people, such as a judge's reasons.
  """

  score: float | None
  error: str = ''
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
  text: str = ''


class RewardFunction(Protocol):
  """Scores a finished episode. Whatever it raises counts as a missing score."""

  async def __call__(self, episode: RewardInput) -> RewardOutput:
    """Returns the episode's score, or why there is none."""
    ...


@dataclasses.dataclass(frozen=True)
class GraderReward:
  """Uses a grader as a reward function.

  A reply that makes the grader hang or crash is at fault itself and scores 0.

  Attributes:
    grade: The grader, called with the reply and the item.
  """

  grade: rule_graders.GraderPart

  async def __call__(self, episode: RewardInput) -> RewardOutput:
    """Grades the last reply on a thread of the pool."""
    try:
      score = await episode.pool.run(self.grade, episode.reply, episode.item)
    except GraderFailure as failure:
      return RewardOutput(0.0, str(failure))
    return RewardOutput(score)


@dataclasses.dataclass(frozen=True)
class RewardTerm:
  """Weighs one reward function.

  Attributes:
    function: The reward function.
    weight: Multiplies its score.
    fallback: The score in place of a missing one. With None, a missing score makes the
      episode a failure.
  """

  function: RewardFunction
  weight: float = 1.0
  fallback: float | None = None


@dataclasses.dataclass(frozen=True)
class RewardPipeline:
  """Adds Σ weight · score to the reward of an episode's last turn.

  A pipeline can be pickled.

  Attributes:
    terms: The reward terms by name.
    env_weight: Multiplies the environment's own rewards, at every turn.
  """

  terms: Mapping[str, RewardTerm]
  env_weight: float = 1.0

  def __post_init__(self):
    """Refuses more terms than a batch can tell apart."""
    if len(self.terms) + 1 > MAX_REWARD_TERMS:
      raise ValueError(
        f'{len(self.terms)} reward terms; at most {MAX_REWARD_TERMS - 1} can be told '
        "apart beside the environment's own"
      )

  async def apply(
    self, cache: RolloutCache, name: str, seed: int, pool: ThreadPool
  ) -> None:
    """Rewards a finished episode; one that failed or has no turn stays as it is.

    It records the metrics reward/<term>, the score; reward/<term>/faults, 1 where the
    function reported an error; and reward/env, the environment's own reward. If a score
    is missing and has no fallback, the episode ends as `reward_failed`, unfit for
    training.

    Args:
      cache: The finished episode.
      name: Names the attempt uniquely.
      seed: Randomness of the episode's rewards.
      pool: Runs calls that may block.
    """
    if cache.failed or not cache.turns:
      return
    item = (cache.task.item if cache.task is not None else None) or {}
    item = {rule_graders.GENERATION_PROMPT: cache.generation_prompt, **item}
    outputs = await asyncio.gather(
      *(
        _call_safely(
          term.function,
          RewardInput(cache.messages, item, fold_seed(seed, term_name), name, pool),
        )
        for term_name, term in self.terms.items()
      )
    )
    cache.metrics['reward/env'] = sum(turn.reward for turn in cache.turns)
    total, missing = 0.0, []
    scores = [(cache.metrics['reward/env'], self.env_weight)]
    for (term_name, term), output in zip(self.terms.items(), outputs, strict=True):
      score = term.fallback if output.score is None else output.score
      _record_output(cache, term_name, score, output)
      if score is None:
        missing.append(f'{term_name}: {output.error}')
      else:
        total += term.weight * score
        scores.append((float(score), term.weight))
    if missing:
      cache.truncate('reward_failed', '; '.join(missing))
      return
    cache.extras['reward_terms'] = scores
    for turn in cache.turns:
      turn.reward *= self.env_weight
    cache.turns[-1].reward += total


def _record_output(
  cache: RolloutCache, name: str, score: float | None, output: RewardOutput
) -> None:
  """Puts a term's metrics and text into the episode."""
  metrics = {f'{name}/{key}': value for key, value in output.metrics.items()}
  metrics[f'{name}/faults'] = float(bool(output.error))
  if score is not None:
    metrics[name] = score
  cache.metrics.update({f'reward/{key}': value for key, value in metrics.items()})
  if text := output.text or output.error:
    cache.extras.setdefault('rewards', {})[name] = text[-MAX_TEXT_CHARS:]


async def _call_safely(function: RewardFunction, episode: RewardInput) -> RewardOutput:
  """Calls a reward function; what it raises and an invalid score become errors."""
  try:
    output = await function(episode)
    score = None if output.score is None else as_real_number(output.score)
    is_valid = output.score is None or (score is not None and is_valid_reward(score))
  except Exception as error:
    return RewardOutput(None, describe_error(error))
  if not is_valid:
    error = f'its score is {output.score}, not a number of at most ±{MAX_REWARD:g}'
    return dataclasses.replace(output, score=None, error=error)
  return dataclasses.replace(output, score=score)
