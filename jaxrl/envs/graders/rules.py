"""Graders by plain rules: the exact answer, a format, a choice among letters.

Each function makes one grader, a `Part`, from its options.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl.envs.graders.answers import marked_answer
from jaxrl.envs.graders.processes import shared
from jaxrl.signature import ConfigError

Item = Mapping[str, Any]
Part = Callable[[str, Item], float]  # (reply, the data set's item) → score, 1 for right

_ANSWER_IS = re.compile(r'(?i:\banswer)(?:\s+is)?\s*:?[\s*]*\(?([A-Z])\b(?![\'’])')
_LETTER = re.compile(r'\(?([A-Za-z])\)?[.:]?|\(?([A-Z])[).:]\s.*', re.DOTALL)
_STYLE = re.compile(r'\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}')


def expected(item: Item, grader: str) -> str:
  """The item's answer as text; ValueError where it has none."""
  if item.get('answer') is None:
    raise ValueError(
      f'grader {grader!r}: the task has no answer: set dataset.answer_key'
    )
  return str(item['answer']).strip()


def exact(*, marked: bool = False, case: bool = True) -> Part:
  r"""1 if the reply is the item's answer but for white space, else 0.

  marked: not the whole reply, but what its last `\boxed{}` or `####` marks. case:
  whether large and small letters differ.
  """

  def tidy(text: str) -> str:
    text = ' '.join(text.split())
    return text if case else text.casefold()

  def grade(reply: str, item: Item) -> float:
    answer = expected(item, 'exact')
    if marked:
      reply, answer = marked_answer(reply), marked_answer(answer) or answer
    return float(bool(reply) and tidy(reply) == tidy(answer))

  return grade


def form(*, pattern: str = '', tags: str = '', timeout: float = 1.0) -> Part:
  r"""1 if the reply has the form that is asked for, else 0.

  pattern: a regular expression that the whole reply must match, white space at its
  ends aside; `.` stands for line ends too. tags: as 'think, answer', the reply is
  `<think>…</think>` and then `<answer>…</answer>`, each once, neither empty, and
  nothing else. timeout: seconds that matching may take; a few bytes can cost a bad
  pattern hours. Raises ConfigError for none or both, and GraderTimeout.
  """
  if bool(pattern) == bool(tags):
    raise ConfigError("format: give a pattern='…' or tags='…', one of the two")
  names = [name.strip() for name in tags.split(',')]
  if tags and not all(re.fullmatch(r'[\w\-]+', name) for name in names):
    raise ConfigError(f"format: tags is {tags!r}; write names, as in 'think, answer'")
  try:
    re.compile(pattern)
  except re.error as error:
    raise ConfigError(f'format: pattern {pattern!r}: {error}') from error

  def grade(reply: str, item: Item) -> float:
    del item
    if tags:
      return float(tagged(reply, names))
    call = shared().call
    return float(call(f'{__name__}:matches', pattern, reply.strip(), limit=timeout))

  return grade


def matches(pattern: str, text: str) -> bool:
  """Whether the whole text matches: may take forever."""
  return re.fullmatch(pattern, text, re.DOTALL) is not None


def tagged(text: str, names: list[str]) -> bool:
  """Whether `text` is these elements in order, each once, with something in them."""
  rest = text.strip()
  for name in names:
    start, end = f'<{name}>', f'</{name}>'
    if text.count(start) != 1 or text.count(end) != 1:
      return False
    if not rest.startswith(start):
      return False
    inside, found, rest = rest[len(start) :].partition(end)
    if not found or not inside.strip():
      return False
    rest = rest.lstrip()
  return not rest


def multiple_choice(*, strict: bool = False) -> Part:
  r"""1 if the reply chooses the item's letter, else 0.

  Chosen is what `\boxed{}` or `####` marks; else the letter after the last 'answer is'
  or 'answer:'; else that of a last line such as `B`, `**(B)**` or `B. Paris`; strict:
  only what is marked. The item's answer is a letter, `B` or `(B)`, or the text of one
  of its `choices`, where it has a list of them.
  """

  def grade(reply: str, item: Item) -> float:
    answer = expected(item, 'multiple_choice')
    choices = [str(choice).strip() for choice in item.get('choices') or ()]
    if answer in choices:
      answer = chr(ord('A') + choices.index(answer))
    right = _only_letter(marked_answer(answer) or answer)
    if not right:
      raise ValueError(
        f'grader multiple_choice: the answer {answer!r} is neither a letter nor one '
        f'of the choices {choices}'
      )
    return float(chosen(reply, choices, strict=strict) == right)

  return grade


def chosen(reply: str, choices: list[str], *, strict: bool = False) -> str:
  """The letter that a reply chooses, or ''."""
  marked = marked_answer(reply)
  if marked in choices:
    return chr(ord('A') + choices.index(marked))
  if marked or strict:
    return _only_letter(marked)
  found = _ANSWER_IS.findall(reply)
  return found[-1] if found else _only_letter(reply.strip().rpartition('\n')[2])


def _only_letter(text: str) -> str:
  r"""The letter that `text` is, as in B, (b), **B.**, \text{B} or B) Paris; else ''."""
  found = _LETTER.fullmatch(_STYLE.sub(r'\1', text[:1000]).strip(' *$\t'))
  return (found.group(1) or found.group(2)).upper() if found else ''
