"""Countdown: reach a target number from given numbers by + - * / and brackets.

This is the game of TinyZero, https://github.com/Jiayi-Pan/TinyZero. The model answers
with an expression inside `<answer>` tags or on its last line. The expression is read by
a parser of our own and computed in fractions; nothing is ever evaluated as Python.
"""

import operator
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from jaxrl.envs import reply_parsing
from jaxrl.envs.env_registry import Info, ResetOptions

EXPRESSION_HELP = (
  'Answer with one expression within <answer> tags, such as (1 + 2) * 3.'
)
_MAX_DRAWS = 1000
_MAX_TOKENS = 100  # nested brackets recurse
_TOKEN = re.compile(r'\s*([0-9]+|[-+*/()])')
_SIGN_ALIASES = str.maketrans({'×': '*', '·': '*', '÷': '/', '−': '-', '–': '-'})
_OPERATORS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
  '+': operator.add,
  '-': operator.sub,
  '*': operator.mul,
  '/': operator.truediv,
}


class CountdownEnv:
  """Draws numbers and a target that they reach, as a pure function of the seed.

  Args:
    count: How many numbers there are.
    largest: The largest possible number.
    largest_target: The largest possible target; the smallest is 1.
    use_all: Whether each number must be used exactly once; otherwise at most once.
    attempts: The number of replies that an episode may have.
    reward: The reward for reaching the target.
    format_reward: The reward of an episode that ends with a valid expression of another
      value.
    invalid_reward: The reward of a reply that is not a valid expression; it costs an
      attempt.
    max_chars: The maximum number of characters of an expression.

  Raises:
    ValueError: If an option is out of range.
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
      raise ValueError(f'count must be from 2 to 10, not {count}')
    if min(largest, largest_target, attempts) < 1:
      raise ValueError('largest, largest_target and attempts must be at least 1')
    if not 1 <= max_chars <= 1000:
      raise ValueError(f'max_chars must be from 1 to 1000, not {max_chars}')
    self._draw_options = {
      'count': count,
      'largest': largest,
      'largest_target': largest_target,
    }
    self._use_all = use_all
    self._attempts = attempts
    self._max_chars = max_chars
    self._reward = reward
    self._format_reward = format_reward
    self._invalid_reward = invalid_reward
    self._numbers: list[int] = []
    self._target = self._num_attempts = self._num_invalid = 0

  def reset(
    self, *, seed: int, options: ResetOptions | None = None
  ) -> tuple[str, Info]:
    """Draws numbers and a target."""
    self._numbers, self._target, _ = draw_countdown(seed, **self._draw_options)
    self._num_attempts = self._num_invalid = 0
    listing = ', '.join(map(str, self._numbers))
    once = 'each exactly once' if self._use_all else 'each at most once'
    question = (
      f'Make {self._target} from the numbers {listing}, {once}, by + - * / and '
      'brackets.'
    )
    return question, {'suffix': EXPRESSION_HELP}

  def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
    """Evaluates the reply's expression."""
    if not self._numbers:
      raise RuntimeError('call reset before step')
    self._num_attempts += 1
    last = self._num_attempts >= self._attempts
    try:
      value = self._value(_expression_text(action))
    except ValueError as error:
      self._num_invalid += 1
      info = self._info(False, False)
      return f'{error} {EXPRESSION_HELP}', self._invalid_reward, last, False, info
    if value == self._target:
      return '', self._reward, True, False, self._info(True, True)
    message = f'That makes {value}, not {self._target}.'
    reward = self._format_reward if last else 0.0
    return message, reward, last, False, self._info(False, True)

  def _value(self, text: str) -> Fraction:
    if len(text) > self._max_chars:
      raise ValueError(f'The answer is longer than {self._max_chars} characters.')
    value, used = evaluate_expression(text)
    available, used = Counter(self._numbers), Counter(used)
    if used - available:
      not_available = ', '.join(map(str, (used - available).elements()))
      raise ValueError(f'Not given, or not so often: {not_available}.')
    if self._use_all and available - used:
      unused = ', '.join(map(str, (available - used).elements()))
      raise ValueError(f'Not used: {unused}.')
    return value

  def _info(self, correct: bool, valid: bool) -> Info:
    metrics = {'accuracy': float(correct), 'success': float(correct)}
    metrics |= {'valid': float(valid), 'invalid_actions': float(self._num_invalid)}
    return {'suffix': EXPRESSION_HELP, 'metrics': metrics}


def _expression_text(reply: str) -> str:
  """Returns the expression that a reply answers with, without its markup."""
  text = reply_parsing.tagged_answer(reply)
  if boxed := re.search(r'\\boxed\{(.*)\}', text):
    text = boxed[1]
  for command, sign in (('\\times', '*'), ('\\cdot', '*'), ('\\div', '/')):
    text = text.replace(command, sign)
  text = re.sub(r'\\(?:left|right|[()\[\]])|[$`]', '', text).strip(' *.')
  return re.sub(r'(?i)^(?:the |my |final )*answer(?: is)?[\s:*]+', '', text)


def evaluate_expression(text: str) -> tuple[Fraction, list[int]]:
  """Evaluates an expression exactly.

  What follows an equals sign is ignored.

  Args:
    text: The expression.

  Returns:
    The value, and the integers in the expression in order.

  Raises:
    ValueError: If there is anything but numbers, + - * / and brackets, or a division by
      zero; the error says what is wrong.
  """
  tokens = _tokens(text.translate(_SIGN_ALIASES).partition('=')[0].strip())
  if len(tokens) > _MAX_TOKENS:
    raise ValueError(f'The expression has more than {_MAX_TOKENS} numbers and signs.')
  numbers: list[int] = []
  value, rest = _sum(tokens, numbers)
  if rest:
    raise ValueError(f'Cannot read the expression from {" ".join(rest[:5])!r} on.')
  return value, numbers


def _tokens(text: str) -> list[str]:
  tokens, end = [], 0
  while end < len(text):
    match = _TOKEN.match(text, end)
    if match is None:
      raise ValueError(f'Cannot read the expression from {text[end : end + 20]!r} on.')
    tokens.append(match.group(1))
    end = match.end()
  return tokens


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
  """Evaluates operands joined by some of `signs` from left to right."""
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


def draw_countdown(
  seed: int, *, count: int, largest: int, largest_target: int
) -> tuple[list[int], int, str]:
  """Draws numbers, a target and an expression that reaches it with all of them.

  Args:
    seed: The seed.
    count: How many numbers there are.
    largest: The largest possible number.
    largest_target: The largest possible target.

  Returns:
    The numbers, the target and the expression.

  Raises:
    ValueError: If no target was found.
  """
  for attempt in range(_MAX_DRAWS):
    rng = np.random.default_rng([seed, attempt])
    numbers = [int(n) for n in rng.integers(1, largest + 1, size=count)]
    value, text = _join(rng, numbers)
    if (
      value.denominator == 1
      and 1 <= value <= largest_target
      and int(value) not in numbers
    ):
      return numbers, int(value), text
  raise ValueError(
    f'{count} numbers up to {largest} made no target up to {largest_target} in '
    f'{_MAX_DRAWS} draws; raise largest_target'
  )


def _join(rng: np.random.Generator, numbers: list[int]) -> tuple[Fraction, str]:
  """Joins the numbers pairwise in random order; returns value and expression."""
  parts = [(Fraction(number), str(number)) for number in numbers]
  while len(parts) > 1:
    left, right = (parts.pop(int(rng.integers(len(parts)))) for _ in range(2))
    sign = '+-*/'[rng.integers(4)]
    if sign == '/' and (right[0] == 0 or (left[0] / right[0]).denominator > 1):
      sign = '-'
    value = _OPERATORS[sign](left[0], right[0])
    parts.append((value, f'({left[1]} {sign} {right[1]})'))
  return parts[0]
