"""The final answer in a reply, and when two answers plainly agree."""

import re
from decimal import Decimal, InvalidOperation

NUMBER = re.compile(r'-?\d[\d,]*(?:\.\d+)?(?:/\d+)?')
LONGEST = 1000  # characters of an answer that are looked at
_MARKS = re.compile(r'\\(?:left|right|,|;|!| |quad|displaystyle)|\$|\s+')


def marked_answer(text: str) -> str:
  r"""What stands after the last `####` or in the last `\boxed{}`; else ''."""
  hashes, box = text.rfind('####'), text.rfind('\\boxed{')
  if max(hashes, box) < 0:
    return ''
  if box > hashes:
    return _braced(text, box + len('\\boxed{'))
  return text[hashes + 4 :].strip().split('\n')[0].strip()


def final_answer(text: str) -> str:
  """The marked answer, else the last number, else the whole text."""
  marked = marked_answer(text)
  if marked:
    return marked
  numbers = NUMBER.findall(text)
  return numbers[-1] if numbers else text.strip()


def _braced(text: str, start: int) -> str:
  """The text from `start` to the brace that closes it; '' if none does."""
  depth = 1
  for end in range(start, min(len(text), start + LONGEST)):
    depth += {'{': 1, '}': -1}.get(text[end], 0)
    if depth == 0:
      return text[start:end].strip()
  return ''


def number(text: str) -> Decimal | None:
  """The number that `text` is: integer, decimal, percent or fraction; else None."""
  text = text.strip().strip('$').rstrip('.%').replace(',', '').replace('\\', '')
  if len(text) > 64 or not re.fullmatch(r'[+-]?\d*\.?\d+(?:/\d*\.?\d+)?', text):
    return None
  top, _, bottom = text.partition('/')
  try:
    return Decimal(top) / Decimal(bottom or '1')
  except (InvalidOperation, ZeroDivisionError):
    return None


def normal(text: str) -> str:
  """`text` without what does not change a formula: spaces, dollars, sizes."""
  text = text[:LONGEST]
  fraction = re.fullmatch(r'\s*(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}\s*', text)
  if fraction:
    text = '{}{}/{}'.format(*fraction.groups())
  return _MARKS.sub('', text).removesuffix('.').lower()


def decide(given: str, expected: str) -> bool | None:
  """Whether two final answers agree; None where that is for algebra to say.

  Numbers agree or not by their value; other answers agree if they read the same.
  """
  if not given or not expected:
    return False
  given, expected = normal(given), normal(expected)
  left, right = number(given), number(expected)
  if left is not None and right is not None:
    return left == right
  return True if given == expected else None


def same(given: str, expected: str) -> bool:
  """Whether two final answers agree: as numbers if both are, else as plain text."""
  return bool(decide(given, expected))
