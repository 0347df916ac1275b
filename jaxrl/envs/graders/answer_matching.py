"""Answer matching finds the final answer in a reply and compares answers."""

import re
from decimal import Decimal, InvalidOperation

NUMBER_PATTERN = re.compile(r'-?\d[\d,]*(?:\.\d+)?(?:/\d+)?')
MAX_ANSWER_CHARS = 1000  # characters of an answer that are looked at
_IGNORED_MARKUP = re.compile(r'\\(?:left|right|,|;|!| |quad|displaystyle)|\$|\s+')


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

  Args:
    text: The text.

  Returns:
    The number, or None if the text is none.
  """
  text = text.strip().strip('$').rstrip('.%').replace(',', '').replace('\\', '')
  if len(text) > 64 or not re.fullmatch(r'[+-]?\d*\.?\d+(?:/\d*\.?\d+)?', text):
    return None
  top, _, bottom = text.partition('/')
  try:
    return Decimal(top) / Decimal(bottom or '1')
  except (InvalidOperation, ZeroDivisionError):
    return None


def normalize_answer(text: str) -> str:
  """Removes what does not change a formula, such as spaces, dollar signs and sizes.

  Args:
    text: The answer.

  Returns:
    The normalized answer.
  """
  text = text[:MAX_ANSWER_CHARS]
  fraction = re.fullmatch(r'\s*(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}\s*', text)
  if fraction:
    text = '{}{}/{}'.format(*fraction.groups())
  return _IGNORED_MARKUP.sub('', text).removesuffix('.').lower()


def compare_answers(candidate: str, expected: str) -> bool | None:
  """Compares two final answers where no algebra is needed.

  Numbers are compared by value; other answers agree if their normalized texts are
  equal.

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
  return True if candidate == expected else None


def answers_match(candidate: str, expected: str) -> bool:
  """Returns whether two final answers agree, as numbers if both are, else as text.

  Args:
    candidate: The answer of the reply.
    expected: The right answer.

  Returns:
    True if they agree.
  """
  return bool(compare_answers(candidate, expected))
