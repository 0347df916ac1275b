"""Answer matching compares final answers where no algebra is needed."""

import re

from jaxrl.envs.graders.answer_marks import MAX_ANSWER_CHARS
from jaxrl.envs.graders.answer_numbers import UNIT_NAMES, clean_text, parse_quantity

_IGNORED_MARKUP = re.compile(
  r'\\(?:left|right|,|;|!| |quad|displaystyle|[()\[\]])|\$|\*\*|(?<![0-9]) | (?![0-9])'
)
_THOUSANDS_SPACE = re.compile(r'(?<=[0-9]) (?=[0-9]{3}(?![0-9]))')
_ODD_DIGITS = re.compile(r'[0-9]_[0-9]{3}|(?![0-9])\d')
_STYLE = re.compile(
  r'\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}'
)
_TIME = re.compile(r'0?(\d{1,2})(?::(\d\d))?\s*([ap])\.?\s?m\b\.?', re.IGNORECASE)
_CLOCK = re.compile(r'\d:\d')
_LETTERS = re.compile(r'[a-z]{2,}')
# Algebra would read words as products of unknowns, so that 'no' equals 'on'.
_LITERAL_WORDS = frozenset(['yes', 'no', 'true', 'false', 'none'])
_FORMULA_WORDS = frozenset(
  'sqrt frac dfrac tfrac cfrac sin cos tan sec csc cot arcsin arccos arctan log exp '
  'lim max min mod gcd lcm pi theta alpha beta gamma infty infinity cdot times begin '
  'end pmatrix bmatrix matrix vmatrix cup cap and left right'.split()
)


def normalize_answer(text: str) -> str:
  """Removes what does not change a formula, such as spaces, dollar signs and sizes.

  A space between digits stays, unless it separates thousands: 1 1/2 is not 11/2.

  Args:
    text: The answer.

  Returns:
    The normalized answer.
  """
  text = ' '.join(text[:MAX_ANSWER_CHARS].split())
  fraction = re.fullmatch(r'(-?)\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}', text)
  if fraction:
    text = '{}{}/{}'.format(*fraction.groups())
  text = _TIME.sub(lambda m: f'{m[1]}:{m[2] or "00"}{m[3].lower()}m', text)
  text = _THOUSANDS_SPACE.sub('', _STYLE.sub(r'\1', text))
  text = _IGNORED_MARKUP.sub('', text).strip('`"')
  return text.removesuffix('.').removesuffix('\\').lower()


def compare_answers(candidate: str, expected: str) -> bool | None:
  """Compares two final answers where no algebra is needed.

  Numbers are compared by value, with their units; other answers agree if their
  normalized texts are equal. Words, times of day, and answers with digits of other
  scripts or of the form 1_000 agree with nothing else.

  Args:
    candidate: The answer of the reply.
    expected: The right answer.

  Returns:
    Whether they agree; None if only algebra can tell.
  """
  if not candidate or not expected:
    return False
  if max(len(candidate), len(expected)) > MAX_ANSWER_CHARS:
    return False
  candidate, expected = (
    _right_side(candidate, expected),
    _right_side(expected, candidate),
  )
  plain, right_plain = normalize_answer(candidate), normalize_answer(expected)
  if plain == right_plain:
    return True
  left, right = parse_quantity(candidate), parse_quantity(expected)
  if left is not None and right is not None:
    return left.agrees_with(right)
  if _CLOCK.search(plain) or _CLOCK.search(right_plain):
    return False
  # Algebra would read '1_000' as 1 and the last number of '٤٢, 7' as all of it.
  is_odd = any(_ODD_DIGITS.search(text) for text in (plain, right_plain))
  has_words = _has_words(candidate) or _has_words(expected)
  return False if is_odd or has_words else None


def answers_match(candidate: str, expected: str) -> bool:
  """Returns whether two final answers agree, as numbers if both are, else as text.

  Args:
    candidate: The answer of the reply.
    expected: The right answer.

  Returns:
    True if they agree.
  """
  return bool(compare_answers(candidate, expected))


def _right_side(answer: str, other: str) -> str:
  """Returns what an answer such as 'x = 5' says is x, if the other is not one."""
  left, equals, right = answer.rpartition('=')
  if (
    not equals
    or '=' in other
    or re.search(r'[,;<>≤≥≠]|\b(?:or|and)\b|\\[lgn]eq?\b', answer)
  ):
    return answer
  return answer if left.endswith('!') or not right.strip() else right


def _has_words(answer: str) -> bool:
  """Returns whether an answer has words that are neither a formula nor a unit."""
  text = re.sub(r'\\[a-zA-Z]+', ' ', _STYLE.sub(r' \1 ', clean_text(answer))).lower()
  if parse_quantity(answer) is not None:
    return False
  known = _FORMULA_WORDS | UNIT_NAMES
  words = [
    word for word in _LETTERS.findall(text) if word.removesuffix('s') not in known
  ]
  return any(len(word) > 3 or word in _LITERAL_WORDS for word in words)
