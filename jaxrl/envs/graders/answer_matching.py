"""Answer matching finds the final answer in a reply and compares answers.

Only the digits 0 to 9 make a number, as for math-verify. Python's `int` and `float`
take more (other scripts' digits, 1_000, nan, infinity) and are not used.
"""

import re
from decimal import Decimal, InvalidOperation

# Includes what only looks like a number, such as 1_000, so that no part of it counts.
NUMBER_PATTERN = re.compile(r'[-−]?\d(?:[\d,]|_(?=\d))*(?:\.\d+)?(?:/\d+)?')
MAX_ANSWER_CHARS = 1000  # characters of an answer that are looked at
_IGNORED_MARKUP = re.compile(
  r'\\(?:left|right|,|;|!| |quad|displaystyle)|\$|(?<![0-9]) | (?![0-9])'
)
_THOUSANDS_SPACE = re.compile(r'(?<=[0-9]) (?=[0-9]{3}(?![0-9]))')
# Groups of three, as in 1,234,567, or of two before the last, as in 12,34,567.
_THOUSANDS = re.compile(r'([+-]?[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3})(?![0-9,])')
_ODD_DIGITS = re.compile(r'[0-9]_[0-9]{3}|(?![0-9])\d')
_NUMBER = re.compile(r'[+-]?[0-9]*\.?[0-9]+(?:/[0-9]*\.?[0-9]+)?')


def marked_answer(text: str) -> str:
  r"""Returns the answer that a reply marks as final.

  Args:
    text: The reply.

  Returns:
    What follows the last `####` or is in the last `\boxed{}`; '' if neither occurs.
  """
  hashes, box = text.rfind('####'), text.rfind('\\boxed{')
  if max(hashes, box) < 0:
    return ''
  if box > hashes:
    return _braced(text, box + len('\\boxed{'))
  return text[hashes + 4 :].strip().split('\n')[0].strip()


def final_answer(text: str) -> str:
  """Returns the marked answer, else the last number, else the whole text.

  Args:
    text: The reply.

  Returns:
    The answer.
  """
  marked = marked_answer(text)
  if marked:
    return marked
  numbers = NUMBER_PATTERN.findall(text)
  return numbers[-1] if numbers else text.strip()


def _braced(text: str, start: int) -> str:
  """Returns the text from `start` to its closing brace; '' if there is none."""
  depth = 1
  for end in range(start, min(len(text), start + MAX_ANSWER_CHARS)):
    depth += {'{': 1, '}': -1}.get(text[end], 0)
    if depth == 0:
      return text[start:end].strip()
  return ''


def parse_number(text: str) -> Decimal | None:
  """Parses an integer, decimal, percentage or fraction.

  Commas must separate thousands: 1,000 is a number, and 1,2 is not.

  Args:
    text: The text.

  Returns:
    The number, or None if the text is none.
  """
  text = text.strip().strip('$').rstrip('.,%').replace('\\', '').replace('−', '-')
  if match := _THOUSANDS.match(text):
    text = match[1].replace(',', '') + text[match.end() :]
  if len(text) > 64 or not _NUMBER.fullmatch(text):
    return None
  top, _, bottom = text.partition('/')
  try:
    return Decimal(top) / Decimal(bottom or '1')
  except (InvalidOperation, ZeroDivisionError):
    return None


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
  text = _THOUSANDS_SPACE.sub('', text)
  return _IGNORED_MARKUP.sub('', text).removesuffix('.').lower()


def compare_answers(candidate: str, expected: str) -> bool | None:
  """Compares two final answers where no algebra is needed.

  Numbers are compared by value; other answers agree if their normalized texts are
  equal. An answer with digits of other scripts, or of the form 1_000, agrees with
  nothing else.

  Args:
    candidate: The answer of the reply.
    expected: The right answer.

  Returns:
    Whether they agree; None if only algebra can tell.
  """
  if not candidate or not expected:
    return False
  candidate, expected = normalize_answer(candidate), normalize_answer(expected)
  left, right = parse_number(candidate), parse_number(expected)
  if left is not None and right is not None:
    return left == right
  if candidate == expected:
    return True
  # Algebra would read '1_000' as 1 and the last number of '٤٢, 7' as all of it.
  is_odd = any(_ODD_DIGITS.search(text) for text in (candidate, expected))
  return False if is_odd else None


def answers_match(candidate: str, expected: str) -> bool:
  """Returns whether two final answers agree, as numbers if both are, else as text.

  Args:
    candidate: The answer of the reply.
    expected: The right answer.

  Returns:
    True if they agree.
  """
  return bool(compare_answers(candidate, expected))
