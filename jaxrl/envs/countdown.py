"""Countdown: reach a target number from given numbers by + - * / and brackets.

As in the game of TinyZero, https://github.com/Jiayi-Pan/TinyZero. The model answers
with an expression inside `<answer>` tags or on its last line. It is read by a parser
of its own and worked out in fractions: nothing is ever evaluated as Python.
"""

import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from jaxrl.envs import replies

HELP = 'Answer with one expression within <answer> tags, such as (1 + 2) * 3.'
_TRIES = 1000
_MOST_TOKENS = 100  # brackets within brackets recurse
_TOKEN = re.compile(r'\s*([0-9]+|[-+*/()])')
_SAME = str.maketrans({'×': '*', '·': '*', '÷': '/', '−': '-', '–': '-'})
_OPERATORS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
  '+': operator.add,
  '-': operator.sub,
  '*': operator.mul,
  '/': operator.truediv,
}


class CountdownEnv:
  """One set of numbers and a target that they reach, a pure function of the seed.

  count: how many numbers. largest: of them. largest_target: of the target, which is
  from 1. use_all: each number is to be used exactly once; otherwise at most once.
  attempts: replies that an episode may have. reward: for the target. format_reward:
  for an episode that ends with a proper expression of another value. invalid_reward:
  for a reply that is none, which costs an attempt. max_chars: of an expression.
  """

  uses_dataset = False  # its tasks are seeds

  def __init__(
    self,
    *,
    count: int = 4,
    largest: int = 50,
    largest_target: int = 100,
    use_all: bool = True,
    attempts: int = 1,
    reward: float = 1.0,
    format_reward: float = 0.0,
    invalid_reward: float = 0.0,
    max_chars: int = 200,
  ):
    if not 2 <= count <= 10:
      raise ValueError(f'count lies within 2 and 10, not {count}')
    if min(largest, largest_target, attempts) < 1:
      raise ValueError('largest, largest_target and attempts start at 1')
    if not 1 <= max_chars <= 1000:
      raise ValueError(f'max_chars lies within 1 and 1000, not {max_chars}')
    self._drawing = {'count': count, 'largest': largest, 'most': largest_target}
    self._use_all, self._attempts, self._max_chars = use_all, attempts, max_chars
    self._reward, self._format_reward = reward, format_reward
    self._invalid_reward = invalid_reward
    self._numbers: list[int] = []
    self._target = self._made = self._invalid = 0

  def reset(
    self, *, seed: int, options: Mapping[str, Any] | None = None
  ) -> tuple[str, dict[str, Any]]:
    self._numbers, self._target, _ = draw(seed, **self._drawing)
    self._made = self._invalid = 0
    listing = ', '.join(map(str, self._numbers))
    once = 'each exactly once' if self._use_all else 'each at most once'
    question = (
      f'Make {self._target} from the numbers {listing}, {once}, by + - * / and '
      'brackets.'
    )
    return question, {'suffix': HELP}

  def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    if not self._numbers:
      raise RuntimeError('call reset before step')
    self._made += 1
    last = self._made >= self._attempts
    try:
      value = self._value(replies.answer(action))
    except ValueError as error:
      self._invalid += 1
      info = self._info(False, False)
      return f'{error} {HELP}', self._invalid_reward, last, False, info
    if value == self._target:
      return '', self._reward, True, False, self._info(True, True)
    shown = f'That makes {value}, not {self._target}.'
    reward = self._format_reward if last else 0.0
    return shown, reward, last, False, self._info(False, True)

  def _value(self, text: str) -> Fraction:
    if len(text) > self._max_chars:
      raise ValueError(f'The answer is longer than {self._max_chars} characters.')
    value, used = evaluate(text)
    given, used = Counter(self._numbers), Counter(used)
    if used - given:
      wrong = ', '.join(map(str, (used - given).elements()))
      raise ValueError(f'Not given, or not so often: {wrong}.')
    if self._use_all and given - used:
      unused = ', '.join(map(str, (given - used).elements()))
      raise ValueError(f'Not used: {unused}.')
    return value

  def _info(self, correct: bool, valid: bool) -> dict[str, Any]:
    metrics = {'accuracy': float(correct), 'success': float(correct)}
    metrics |= {'valid': float(valid), 'invalid_actions': float(self._invalid)}
    return {'suffix': HELP, 'metrics': metrics}


def evaluate(text: str) -> tuple[Fraction, list[int]]:
  """The value of an expression and the whole numbers in it, in order.

  What follows an equals sign is left out. Raises ValueError, which says what is wrong,
  for anything but numbers, + - * / and brackets, and for a division by zero.
  """
  tokens = _tokens(text.translate(_SAME).partition('=')[0].strip())
  if len(tokens) > _MOST_TOKENS:
    raise ValueError(f'The expression has more than {_MOST_TOKENS} numbers and signs.')
  numbers: list[int] = []
  value, rest = _sum(tokens, numbers)
  if rest:
    raise ValueError(f'Cannot read the expression from {" ".join(rest[:5])!r} on.')
  return value, numbers


def _tokens(text: str) -> list[str]:
  found, end = [], 0
  while end < len(text):
    match = _TOKEN.match(text, end)
    if match is None:
      raise ValueError(f'Cannot read the expression from {text[end : end + 20]!r} on.')
    found.append(match.group(1))
    end = match.end()
  return found


def _sum(tokens: list[str], numbers: list[int]) -> tuple[Fraction, list[str]]:
  return _chain(tokens, numbers, '+-', _product)


def _product(tokens: list[str], numbers: list[int]) -> tuple[Fraction, list[str]]:
  return _chain(tokens, numbers, '*/', _factor)


def _chain(
  tokens: list[str],
  numbers: list[int],
  signs: str,
  part: Callable[[list[str], list[int]], tuple[Fraction, list[str]]],
) -> tuple[Fraction, list[str]]:
  """Parts joined by some of `signs`, from left to right; the value and the rest."""
  value, tokens = part(tokens, numbers)
  while tokens and tokens[0] in signs:
    right, rest = part(tokens[1:], numbers)
    if tokens[0] == '/' and right == 0:
      raise ValueError('The expression divides by zero.')
    value, tokens = _OPERATORS[tokens[0]](value, right), rest
  return value, tokens


def _factor(tokens: list[str], numbers: list[int]) -> tuple[Fraction, list[str]]:
  if not tokens:
    raise ValueError('The expression ends too early.')
  head, rest = tokens[0], tokens[1:]
  if head == '-':
    value, rest = _factor(rest, numbers)
    return -value, rest
  if head == '(':
    value, rest = _sum(rest, numbers)
    if rest[:1] != [')']:
      raise ValueError('A bracket is not closed.')
    return value, rest[1:]
  if not head.isdigit():
    raise ValueError(f'A number should stand in place of {head!r}.')
  numbers.append(int(head))
  return Fraction(int(head)), rest


def draw(
  seed: int, *, count: int, largest: int, most: int
) -> tuple[list[int], int, str]:
  """Numbers, a target within 1 and `most`, and an expression that uses them all.

  Raises ValueError when none is found.
  """
  for again in range(_TRIES):
    rng = np.random.default_rng([seed, again])
    numbers = [int(n) for n in rng.integers(1, largest + 1, size=count)]
    value, text = _join(rng, numbers)
    if value.denominator == 1 and 1 <= value <= most and int(value) not in numbers:
      return numbers, int(value), text
  raise ValueError(
    f'{count} numbers up to {largest} made no target up to {most} in {_TRIES} draws; '
    'raise largest_target'
  )


def _join(rng: np.random.Generator, numbers: list[int]) -> tuple[Fraction, str]:
  """The numbers joined two by two in some order; the value and the expression."""
  parts = [(Fraction(number), str(number)) for number in numbers]
  while len(parts) > 1:
    left, right = (parts.pop(int(rng.integers(len(parts)))) for _ in range(2))
    sign = '+-*/'[rng.integers(4)]
    if sign == '/' and (right[0] == 0 or (left[0] / right[0]).denominator > 1):
      sign = '-'
    value = _OPERATORS[sign](left[0], right[0])
    parts.append((value, f'({left[1]} {sign} {right[1]})'))
  return parts[0]
