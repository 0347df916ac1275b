"""A language model as a judge: asked in words, its verdict found by a pattern."""

import asyncio
import re
import string
from collections.abc import Sequence
from typing import Any

from jaxrl.data.seeds import fold
from jaxrl.envs.graders.processes import shared
from jaxrl.envs.graders.verdicts import SCORE, last_number
from jaxrl.rollout.handles import settle
from jaxrl.rollout.rewards.stage import Played, Word
from jaxrl.signature import ConfigError, unknown

TEMPLATE = """You grade an answer to a question.

Question:
{question}

Reference answer, which may be missing:
{reference}

The answer to grade:
{reply}

How good is it? Give your reasons in a few sentences, and end with a line `Score: N`,
where N is a number from {low}, worthless, to {high}, perfect."""
FIELDS = ('question', 'answer', 'reference', 'reply', 'conversation', 'low', 'high')
MATCHING = 1.0  # seconds that a pattern of the user's may take


class Judge:
  """Asks a model what an episode is worth: 0 for the low end of the scale, 1 the high.

  judge: has `ask(name, messages, *, seed, temperature, max_tokens) -> text`; may be
  remote. template: the prompt, or a file that holds it. Its fields: {question},
  {answer} and {reference}, the item's (a reference is by default the answer), {reply},
  the model's last, {conversation}, {low} and {high}. system: a message before it.
  pattern: a regular expression whose group 1, where it matches last, is the verdict.
  scale: verdicts below or above are none. votes: how often it is asked, each time with
  a seed of its own; the mean of the verdicts found counts. quorum: so many must be
  found. temperature, max_tokens: of its answers.
  """

  def __init__(
    self,
    judge: Any,
    *,
    template: str = TEMPLATE,
    system: str = '',
    pattern: str = SCORE,
    scale: Sequence[float] = (0.0, 10.0),
    votes: int = 1,
    quorum: int = 1,
    temperature: float = 0.0,
    max_tokens: int = 512,
  ):
    self._judge, self._system, self._votes = judge, system, votes
    self._template, self._pattern = _read(template), _checked(pattern)
    self._low, self._high = _ends(scale)
    self._quorum, self._temperature = quorum, temperature
    self._max_tokens = max_tokens
    if not 1 <= quorum <= votes:
      raise ConfigError(f'judge: quorum={quorum} must lie in 1 … votes={votes}')
    if votes > 1 and temperature == 0:
      raise ConfigError(
        f'judge: votes={votes} at temperature=0 would all be the same; set temperature'
      )
    if temperature < 0 or max_tokens < 1:
      raise ConfigError('judge: temperature is at least 0, and max_tokens 1')

  def messages(self, played: Played) -> list[dict[str, str]]:
    """What it is asked about an episode."""
    answer = _text(played.item.get('answer'))
    prompt = self._template.format(
      question=played.question,
      answer=answer,
      reference=_text(played.item.get('reference')) or answer,
      reply=played.reply,
      conversation=played.conversation,
      low=f'{self._low:g}',
      high=f'{self._high:g}',
    )
    system = [{'role': 'system', 'content': self._system}] if self._system else []
    return [*system, {'role': 'user', 'content': prompt}]

  async def __call__(self, played: Played) -> Word:
    """unparsable, failed: how many votes gave no verdict, or no answer at all."""
    messages = self.messages(played)
    asked = (self._vote(played, messages, vote) for vote in range(self._votes))
    texts = await asyncio.gather(*asked, return_exceptions=True)
    scores, faults, said = [], [], []
    lost = {'unparsable': 0.0, 'failed': 0.0}
    for text in texts:
      if isinstance(text, BaseException):
        lost['failed'] += 1
        faults.append(f'{type(text).__name__}: {text}')
        continue
      said.append(text)
      score, fault = await self._verdict(text, played)
      if score is None:
        lost['unparsable'] += 1
        faults.append(fault)
      else:
        scores.append(score)
    told = '\n---\n'.join(said)
    if len(scores) >= self._quorum:
      return Word(sum(scores) / len(scores), metrics=lost, said=told)
    fault = f'{len(scores)} of {self._votes} votes count; {faults[-1]}'
    return Word(None, fault, lost, told)

  async def _vote(self, played: Played, messages: list[Any], vote: int) -> str:
    answer = self._judge.ask(
      f'{played.name}/{played.seed}/{vote}',
      messages,
      seed=fold(played.seed, 'judge', vote),
      temperature=self._temperature,
      max_tokens=self._max_tokens,
    )
    return await settle(answer)

  async def _verdict(self, text: str, played: Played) -> tuple[float | None, str]:
    """The vote's score in [0, 1], or None and what is wrong with its answer."""
    if self._pattern == SCORE:
      found = last_number(SCORE, text)
    else:  # in a process that can be killed: what the judge wrote is not in our hands
      target = 'jaxrl.envs.graders.verdicts:last_number'
      try:
        found = await played.pool.run(
          lambda: shared().call(target, self._pattern, text, limit=MATCHING)
        )
      except RuntimeError as error:
        return None, f'its pattern gave up: {error}'
    if found is None:
      return None, f'no verdict in {text[-80:]!r}'
    if not self._low <= found <= self._high:
      return None, f'the verdict {found:g} is off the scale'
    return (found - self._low) / (self._high - self._low), ''


def _read(template: str) -> str:
  """The template's text. ConfigError for fields that there are not."""
  if '{' not in template:
    try:
      with open(template, encoding='utf-8') as file:
        template = file.read()
    except OSError as error:
      raise ConfigError(
        f'judge: template {template!r} has no field, so it must name a file that can '
        f'be read: {error.strerror}'
      ) from error
  try:
    names = [name for _, name, _, _ in string.Formatter().parse(template)]
  except ValueError as error:
    raise ConfigError(f'judge: template: {error} (a bare brace is {{{{)') from error
  names = [name for name in names if name is not None]
  for name in names:
    if name not in FIELDS:
      raise unknown(name, FIELDS, 'field', 'judge: template')
  if not {'reply', 'conversation'} & set(names):
    raise ConfigError('judge: the template shows neither {reply} nor {conversation}')
  return template


def _checked(pattern: str) -> str:
  try:
    groups = re.compile(pattern).groups
  except re.error as error:
    raise ConfigError(f'judge: pattern {pattern!r}: {error}') from error
  if not groups:
    raise ConfigError(f'judge: pattern {pattern!r} needs a (group) for the number')
  return pattern


def _ends(scale: Sequence[float]) -> tuple[float, float]:
  try:
    low, high = (float(end) for end in scale)
  except (TypeError, ValueError):
    low = high = 0.0
  if not low < high:
    raise ConfigError(f'judge: scale={scale!r}; write two numbers, as in (0, 10)')
  return low, high


def _text(value: Any) -> str:
  return '' if value is None else str(value)
