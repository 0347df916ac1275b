"""LLMJudge scores episodes with a language model, whose verdict a pattern finds."""

import asyncio
import re
import string
from collections.abc import Sequence
from typing import Any

from jaxrl.data.seeds import fold_seed
from jaxrl.envs.graders.grader_processes import shared_grader_pool
from jaxrl.envs.reply_parsing import SCORE_PATTERN, last_number
from jaxrl.options import unknown_name_error
from jaxrl.rollout.engine.actor_proxy import maybe_await
from jaxrl.rollout.rewards.reward_pipeline import RewardInput, RewardOutput

JUDGE_TEMPLATE = """You grade an answer to a question.

Question:
{question}

Reference answer, which may be missing:
{reference}

The answer to grade:
{reply}

How good is it? Give your reasons in a few sentences, and end with a line `Score: N`,
where N is a number from {low}, worthless, to {high}, perfect."""
JUDGE_TEMPLATE_FIELDS = (
  'question',
  'answer',
  'reference',
  'reply',
  'conversation',
  'low',
  'high',
)
PATTERN_TIMEOUT_S = 1.0  # for patterns that the user wrote


class LLMJudge:
  """Asks a model to rate an episode, on a scale that is mapped to [0, 1]."""

  def __init__(
    self,
    judge: Any,
    *,
    template: str = JUDGE_TEMPLATE,
    system: str = '',
    pattern: str = '',
    scale: Sequence[float] = (0.0, 10.0),
    votes: int = 1,
    quorum: int = 1,
    temperature: float = 0.0,
    max_tokens: int = 512,
  ):
    """Creates a judge.

    Args:
      judge: Has `ask(name, messages, *, seed, temperature, max_tokens) -> text`; may be
        remote.
      template: The prompt, or a file that holds it. Its fields are {question}, {answer}
        and {reference} of the item (the reference is by default the answer), {reply},
        the model's last message, {conversation}, {low} and {high}.
      system: The system message; empty for none.
      pattern: A regular expression. Group 1 of its last match is the verdict. '' for
        the usual ways to write a score.
      scale: The lowest and the highest verdict; others do not count.
      votes: How often the judge is asked, each time with another seed. The score is the
        mean of the verdicts.
      quorum: How many verdicts are needed.
      temperature: Sampling temperature of the answers.
      max_tokens: Tokens an answer may have.

    Raises:
      ValueError: If an option is out of range, or the template has unknown fields.
    """
    self._judge = judge
    self._system = system
    self._votes = votes
    self._template = _load_template(template)
    self._pattern = _validate_pattern(pattern) if pattern else ''
    self._low, self._high = _validate_scale(scale)
    self._quorum = quorum
    self._temperature = temperature
    self._max_tokens = max_tokens
    if not 1 <= quorum <= votes:
      raise ValueError(f'judge: quorum={quorum} must lie in 1 … votes={votes}')
    if votes > 1 and temperature == 0:
      raise ValueError(
        f'judge: votes={votes} at temperature=0 would all be the same; set temperature'
      )
    if temperature < 0 or max_tokens < 1:
      raise ValueError('judge: temperature must be ≥ 0, and max_tokens ≥ 1')

  def messages(self, episode: RewardInput) -> list[dict[str, str]]:
    """Builds the prompt about an episode.

    Args:
      episode: The finished episode.

    Returns:
      The messages that the judge is asked to answer.
    """
    answer = _to_text(episode.item.get('answer'))
    prompt = self._template.format(
      question=episode.question,
      answer=answer,
      reference=_to_text(episode.item.get('reference')) or answer,
      reply=episode.reply,
      conversation=episode.conversation,
      low=f'{self._low:g}',
      high=f'{self._high:g}',
    )
    system = [{'role': 'system', 'content': self._system}] if self._system else []
    return [*system, {'role': 'user', 'content': prompt}]

  async def __call__(self, episode: RewardInput) -> RewardOutput:
    """Scores an episode.

    The metrics `unparsable` and `failed` count the votes without a verdict and those
    without an answer.

    Args:
      episode: The finished episode.

    Returns:
      The mean verdict on [0, 1], or None if fewer than `quorum` votes count.
    """
    messages = self.messages(episode)
    votes = (self._vote(episode, messages, vote) for vote in range(self._votes))
    answers = await asyncio.gather(*votes, return_exceptions=True)
    scores, errors, texts = [], [], []
    metrics = {'unparsable': 0.0, 'failed': 0.0}
    for answer in answers:
      if isinstance(answer, BaseException):
        metrics['failed'] += 1
        errors.append(f'{type(answer).__name__}: {answer}')
        continue
      texts.append(answer)
      score, error = await self._parse_verdict(answer, episode)
      if score is None:
        metrics['unparsable'] += 1
        errors.append(error)
      else:
        scores.append(score)
    text = '\n---\n'.join(texts)
    if len(scores) >= self._quorum:
      return RewardOutput(sum(scores) / len(scores), metrics=metrics, text=text)
    error = f'{len(scores)} of {self._votes} votes count; {errors[-1]}'
    return RewardOutput(None, error, metrics, text)

  async def _vote(self, episode: RewardInput, messages: list[Any], vote: int) -> str:
    answer = self._judge.ask(
      f'{episode.name}/{episode.seed}/{vote}',
      messages,
      seed=fold_seed(episode.seed, 'judge', vote),
      temperature=self._temperature,
      max_tokens=self._max_tokens,
    )
    return await maybe_await(answer)

  async def _parse_verdict(
    self, text: str, episode: RewardInput
  ) -> tuple[float | None, str]:
    """Returns the vote's score in [0, 1], or None and what is wrong with its answer."""
    if not self._pattern:
      verdict = last_number(SCORE_PATTERN, text)
    else:
      # A pattern of the user's may run forever on what the judge wrote, so it runs in a
      # process that can be killed.
      target = 'jaxrl.envs.reply_parsing:last_number'
      try:
        verdict = await episode.pool.run(
          lambda: shared_grader_pool().call(
            target, self._pattern, text, limit=PATTERN_TIMEOUT_S
          )
        )
      except RuntimeError as error:
        return None, f'its pattern failed: {error}'
    if verdict is None:
      return None, f'no verdict in {text[-80:]!r}'
    if not self._low <= verdict <= self._high:
      return None, f'the verdict {verdict:g} is off the scale'
    return (verdict - self._low) / (self._high - self._low), ''


def _load_template(template: str) -> str:
  """Returns the template's text; raises ValueError for unknown fields."""
  if '{' not in template:
    try:
      with open(template, encoding='utf-8') as file:
        template = file.read()
    except OSError as error:
      raise ValueError(
        f'judge: template {template!r} has no field, so it must name a file that can '
        f'be read: {error.strerror}'
      ) from error
  try:
    fields = [name for _, name, _, _ in string.Formatter().parse(template)]
  except ValueError as error:
    raise ValueError(
      f'judge: template: {error} (write {{{{ for a literal brace)'
    ) from error
  names = [name for name in fields if name is not None]
  for name in names:
    if name not in JUDGE_TEMPLATE_FIELDS:
      raise unknown_name_error(name, JUDGE_TEMPLATE_FIELDS, 'field', 'judge: template')
  if not {'reply', 'conversation'} & set(names):
    raise ValueError('judge: the template shows neither {reply} nor {conversation}')
  return template


def _validate_pattern(pattern: str) -> str:
  try:
    num_groups = re.compile(pattern).groups
  except re.error as error:
    raise ValueError(f'judge: pattern {pattern!r}: {error}') from error
  if not num_groups:
    raise ValueError(f'judge: pattern {pattern!r} needs a (group) for the number')
  return pattern


def _validate_scale(scale: Sequence[float]) -> tuple[float, float]:
  try:
    low, high = (float(end) for end in scale)
  except (TypeError, ValueError):
    low = high = 0.0
  if not low < high:
    raise ValueError(f'judge: scale={scale!r}; write two numbers, as in (0, 10)')
  return low, high


def _to_text(value: object) -> str:
  return '' if value is None else str(value)
