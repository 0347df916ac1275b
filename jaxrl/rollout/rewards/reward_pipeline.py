"""The reward pipeline adds weighted reward terms to an episode after its end.

A term scores the whole episode, or each step of its replies (a process reward).

Reward functions may wait for engines and servers, so they run as coroutines next to
other episodes. A function returns a score or says why there is none; a score is never
made up.
"""

import asyncio
import bisect
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jaxrl.data.chat_tokenizer import has_images
from jaxrl.data.seeds import fold_seed
from jaxrl.envs.env_registry import MAX_REWARD, as_real_number, is_valid_reward
from jaxrl.envs.graders import rule_graders
from jaxrl.envs.graders.grader_processes import GraderFailure
from jaxrl.envs.graders.rule_graders import TaskItem
from jaxrl.options import Options, option
from jaxrl.rollout.episodes.rollout_cache import RolloutCache
from jaxrl.rollout.thread_pool import ThreadPool
from jaxrl.types import MAX_REWARD_TERMS, Message
from jaxrl.user_code import describe_error

MAX_TEXT_CHARS = 2000  # characters kept of a reward function's text
MAX_STEPS = 64  # of a reply; the last one has what follows


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
  item: TaskItem
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvRewardOptions(Options):
  """Counts the environment's own reward; without this term, its weight is 1."""

  weight: float = option(1.0, "Factor of the score in the episode's reward.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardTermOptions(EnvRewardOptions):
  """How a score becomes a reward."""

  otherwise: float | None = option(
    None, 'Score in place of a missing one; without it, the episode fails.'
  )
  step_end: str = option(
    '',
    'Text that ends a step of a reply: each step is scored, and rewarded where it '
    'ends.',
  )
  gain: bool = option(
    False, 'Rewards a step with its score minus that of the step before.'
  )

  def __post_init__(self):
    """Refuses a gain without steps."""
    super().__post_init__()
    if self.gain and not self.step_end:
      raise ValueError('gain=True rewards steps, and needs step_end')


@dataclasses.dataclass(frozen=True)
class RewardTerm(RewardTermOptions):
  """Weighs one reward function.

  With `step_end`, such as two newlines, the function scores the conversation up to the
  end of each step of each reply, and the step's last token has its reward.

  Attributes:
    function: The reward function.
  """

  function: RewardFunction


@dataclasses.dataclass(frozen=True)
class RewardPipeline:
  """Adds Σ weight · score to the reward of an episode's last turn, or of steps.

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
    function reported an error; and reward/env, the environment's own reward. A term
    that scores steps has reward/<term>, the sum of what they are rewarded with, and
    reward/<term>/steps, their number. If a score is missing and nothing stands in, the
    episode ends as `reward_failed`, unfit for training.

    Args:
      cache: The finished episode; its `chat` decodes the replies.
      name: Names the attempt uniquely.
      seed: Randomness of the episode's rewards.
      pool: Runs calls that may block.
    """
    if cache.failed or not cache.own_turns:
      return
    item = (cache.task.item if cache.task is not None else None) or {}
    item = {rule_graders.GENERATION_PROMPT: cache.generation_prompt, **item}
    outputs = await asyncio.gather(
      *(
        (_score_steps if term.step_end else _score_episode)(
          term,
          RewardInput(cache.messages, item, fold_seed(seed, term_name), name, pool),
          cache,
        )
        for term_name, term in self.terms.items()
      )
    )
    cache.metrics['reward/env'] = sum(turn.reward for turn in cache.turns)
    total, missing = 0.0, []
    scores = [(cache.metrics['reward/env'], self.env_weight)]
    step_rewards: list[tuple[RewardTerm, Mapping[int, float]]] = []
    for (term_name, term), (output, of_steps) in zip(
      self.terms.items(), outputs, strict=True
    ):
      score = term.otherwise if output.score is None else output.score
      _record_output(cache, term_name, score, output)
      if score is None:
        missing.append(f'{term_name}: {output.error}')
      else:
        total += 0.0 if of_steps else term.weight * score
        step_rewards.append((term, of_steps))
        scores.append((float(score), term.weight))
    if missing:
      cache.truncate('reward_failed', '; '.join(missing))
      return
    cache.extras['reward_terms'] = scores
    for turn in cache.turns:
      turn.reward *= self.env_weight
    cache.turns[-1].reward += total
    for term, of_steps in step_rewards:
      _add_step_rewards(cache, {k: term.weight * x for k, x in of_steps.items()})


async def _score_episode(
  term: RewardTerm, episode: RewardInput, cache: RolloutCache
) -> tuple[RewardOutput, Mapping[int, float]]:
  """Scores the whole episode; rewards no step."""
  return await _call_safely(term.function, episode), {}


async def _score_steps(
  term: RewardTerm, episode: RewardInput, cache: RolloutCache
) -> tuple[RewardOutput, Mapping[int, float]]:
  """Scores the conversation up to the end of each step.

  Returns:
    The sum of the steps' rewards as the score, with the first error of a step; and the
    rewards by the index of a step's last token.
  """
  places = [i for i, m in enumerate(cache.messages) if m['role'] == 'assistant']
  turns = cache.own_turns
  places = places[-len(turns) :]  # a prompt may have replies as examples
  if len(places) != len(turns):
    error = f'{len(turns)} turns have {len(places)} replies: no steps to score'
    return RewardOutput(None, error), {}
  ends: list[int] = []
  steps = []
  for place, turn in zip(places, turns, strict=True):
    text, last_tokens = split_steps(
      cache.chat, cache.tokens[turn.start : turn.stop], term.step_end
    )
    ends += [turn.start + token for _, token in last_tokens]
    for end, _ in last_tokens:
      reply = {'role': 'assistant', 'content': text[:end]}
      messages = [*cache.messages[:place], reply]
      steps.append(dataclasses.replace(episode, messages=messages))
  outputs = await asyncio.gather(*(_call_safely(term.function, s) for s in steps))
  error = next((output.error for output in outputs if output.error), '')
  scores = [
    term.otherwise if output.score is None else output.score for output in outputs
  ]
  known = [score for score in scores if score is not None]
  if len(known) < len(scores):
    return RewardOutput(None, error), {}
  before = [0.0, *known] if term.gain else [0.0] * len(known)
  rewards = {
    end: score - less for end, score, less in zip(ends, known, before, strict=False)
  }
  metrics = {'steps': float(len(known))}
  return RewardOutput(sum(rewards.values()), error, metrics), rewards


def split_steps(
  chat: Any, tokens: Sequence[int], step_end: str
) -> tuple[str, list[tuple[int, int]]]:
  """Splits a reply into steps.

  Args:
    chat: Decodes tokens.
    tokens: The reply.
    step_end: What ends a step; the reply ends the last one.

  Returns:
    The reply's text; and for each step the number of characters up to its end, and the
    index of its last token.
  """
  if not tokens:
    return '', []
  text, found = chat.decode(tokens), []
  start = text.find(step_end)
  while start >= 0 and len(found) < MAX_STEPS - 1:
    end = start + len(step_end)
    if text[end:].strip():  # else it ends with the reply
      found.append(end)
    start = text.find(step_end, end)
  count = range(1, len(tokens))
  steps: dict[int, int] = {}  # a token that ends two steps ends the later one
  for end in found:
    size = bisect.bisect_left(count, end, key=lambda n: len(chat.decode(tokens[:n])))
    steps[size] = end
  steps[len(tokens) - 1] = len(text)
  return text, [(end, token) for token, end in steps.items()]


def _add_step_rewards(cache: RolloutCache, rewards: Mapping[int, float]) -> None:
  """Adds rewards by the index of a token; a turn's last one counts for the turn."""
  for turn in cache.turns:
    for place in range(turn.start, turn.stop):
      if place not in rewards:
        continue
      if place == turn.stop - 1:
        turn.reward += rewards[place]
      else:
        known = turn.step_rewards.get(place, 0.0)
        turn.step_rewards[place] = known + rewards[place]


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
