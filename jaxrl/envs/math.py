"""A question with a checkable answer; one turn."""

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

NUMBER = re.compile(r'-?\d[\d,]*(?:\.\d+)?(?:/\d+)?')
_LONGEST = 1000  # characters of an answer that are looked at
_MARKS = re.compile(r'\\(?:left|right|,|;|!| |quad|displaystyle)|\$|\s+')


class MathEnv:
  r"""Asks the task's question; rewards the right final answer.

  reward: for a right answer. format_reward: for a wrong one that is at least marked
  as final (`#### x` or `\boxed{x}`). strict: only marked answers count; otherwise
  the last number of the reply does.
  """

  def __init__(
    self, *, reward: float = 1.0, format_reward: float = 0.0, strict: bool = False
  ):
    self._reward, self._format_reward, self._strict = reward, format_reward, strict
    self._answer = ''

  def reset(
    self, *, seed: int, options: Mapping[str, Any] | None = None
  ) -> tuple[str | None, dict[str, Any]]:
    task = (options or {}).get('task')
    if task is None or task.item is None:
      raise ValueError('the math environment needs a dataset: its tasks are questions')
    answer = str(task.item['answer'])
    self._answer = marked_answer(answer) or answer.strip()
    return str(task.item['question']), {}

  def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    marked = marked_answer(action)
    given = marked if self._strict else final_answer(action)
    correct = same(given, self._answer)
    reward = self._reward if correct else 0.0
    if not correct and marked:
      reward = self._format_reward
    metrics = {'correct': float(correct), 'marked': float(bool(marked))}
    columns = {'given': given, 'expected': self._answer}
    return '', reward, True, False, {'metrics': metrics, 'columns': columns}


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
  for end in range(start, min(len(text), start + _LONGEST)):
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
  text = text[:_LONGEST]
  fraction = re.fullmatch(r'\s*(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}\s*', text)
  if fraction:
    text = '{}{}/{}'.format(*fraction.groups())
  return _MARKS.sub('', text).removesuffix('.').lower()


def same(given: str, expected: str) -> bool:
  """Whether two final answers agree: as numbers if both are, else as plain text."""
  if not given or not expected:
    return False
  given, expected = normal(given), normal(expected)
  left, right = number(given), number(expected)
  if left is not None and right is not None:
    return left == right
  return given == expected
