"""Rule graders check for the exact answer, a format, or a choice among letters.

Each `make_…` function builds one grader, a `GraderPart`, from its options.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl.data.rows.row_choices import choice_texts, letter_at
from jaxrl.envs.graders.answer_marks import marked_answer, says_something
from jaxrl.envs.graders.answer_numbers import number_text
from jaxrl.envs.graders.choice_parsing import chosen_letter, only_letter
from jaxrl.envs.graders.grader_processes import shared_grader_pool
from jaxrl.envs.reply_parsing import without_thought
from jaxrl.options import POSITIVE, option_ranges

_STYLE = re.compile(r'\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}')
# Where an item holds what the chat template writes before a reply, such as
# '<|im_start|>assistant\n<think>\n'.
GENERATION_PROMPT = 'generation_prompt'
TaskItem = Mapping[str, Any]
# (reply, the dataset's row) → score, 1 for right.
GraderPart = Callable[[str, TaskItem], float]


def expected_answer(item: TaskItem, grader: str) -> str:
  """Returns the item's answer as text.

  Args:
    item: The dataset's row.
    grader: The name of the grader, for the error message.

  Returns:
    The answer.

  Raises:
    ValueError: If the item has none.
  """
  if item.get('answer') is None:
    raise ValueError(
      f'grader {grader!r}: the task has no answer: set dataset.columns.answer=KEY'
    )
  return str(item['answer']).strip()


def make_exact_grader(*, marked: bool = False, case: bool = True) -> GraderPart:
  r"""Builds a grader that scores 1 if the reply is the item's answer, else 0.

  White space does not matter, and neither does a thought that ends with `</think>`.

  Args:
    marked: Whether to compare only what the last `\boxed{}`, `####` or `<answer>`
      marks, without markup and, for a number, unit, instead of the whole reply.
    case: Whether case matters.

  Returns:
    The grader.
  """

  def normalize(text: str) -> str:
    text = ' '.join(text.split())
    return text if case else text.casefold()

  def grade(reply: str, item: TaskItem) -> float:
    answer = expected_answer(item, 'exact')
    readings = [without_thought(reply)]
    if marked:
      answer = marked_answer(answer) or answer
      given = marked_answer(reply, answer)
      plain = _STYLE.sub(r'\1', given).strip(' $*`"').removesuffix('.')
      readings = [given, plain, number_text(given)]
    return float(normalize(answer) in [normalize(text) for text in readings if text])

  return grade


@option_ranges(timeout=POSITIVE)
def make_format_grader(
  *, pattern: str = '', tags: str = '', timeout: float = 1.0
) -> GraderPart:
  """Builds a grader that scores 1 if the reply has the required format, else 0.

  Args:
    pattern: A regular expression that the whole reply must match, apart from white
      space at its ends; `.` matches line breaks too.
    tags: Tag names, such as 'think, answer': the reply must be `<think>…</think>`
      followed by `<answer>…</answer>`, each once, nothing else, and each with more in
      it than spaces, dots and markup. A
      tag that the prompt ends with, as some chat templates open `<think>`, counts as
      the reply's.
    timeout: Seconds that matching may take; a few bytes can cost a bad pattern hours.

  Returns:
    The grader, which raises GraderTimeout.

  Raises:
    ValueError: If neither or both of pattern and tags are given, or one is malformed.
  """
  if bool(pattern) == bool(tags):
    raise ValueError("give either a pattern='…' or tags='…'")
  names = [name.strip() for name in tags.split(',')]
  if tags and not all(re.fullmatch(r'[\w\-]+', name) for name in names):
    raise ValueError(f"tags is {tags!r}; write names, as in 'think, answer'")
  try:
    re.compile(pattern)
  except re.error as error:
    raise ValueError(f'pattern {pattern!r}: {error}') from error

  def grade(reply: str, item: TaskItem) -> float:
    if tags:
      prompt = str(item.get(GENERATION_PROMPT) or '')
      opened = [tag for tag in names if prompt.rstrip().endswith(f'<{tag}>')]
      # A model that repeats the tag has written the whole form itself.
      whole = f'<{opened[0]}>{reply}' if opened else reply
      return float(any(has_tags_in_order(text, names) for text in (reply, whole)))
    call = shared_grader_pool().call
    return float(
      call(f'{__name__}:pattern_matches', pattern, reply.strip(), limit=timeout)
    )

  return grade


def pattern_matches(pattern: str, text: str) -> bool:
  """Returns whether a pattern matches a whole text, which may take forever.

  Args:
    pattern: The regular expression.
    text: The text.

  Returns:
    True if it matches.
  """
  return re.fullmatch(pattern, text, re.DOTALL) is not None


def has_tags_in_order(text: str, names: list[str]) -> bool:
  """Returns whether a text consists of the given elements in order.

  Args:
    text: The text.
    names: The names of the elements.

  Returns:
    True if each element occurs once, is not empty, and there is nothing else.
  """
  rest = text.strip()
  for name in names:
    start, end = f'<{name}>', f'</{name}>'
    if text.count(start) != 1 or text.count(end) != 1:
      return False
    if not rest.startswith(start):
      return False
    content, closing, rest = rest[len(start) :].partition(end)
    if not closing or not says_something(content):
      return False
    rest = rest.lstrip()
  return not rest


def make_multiple_choice_grader(*, strict: bool = False) -> GraderPart:
  r"""Builds a grader that scores 1 if the reply chooses the item's letter, else 0.

  The chosen letter is what the last mark, or the last phrase such as 'the answer is',
  names; else that of a line such as `B`, `**(B)**` or `B. Paris`. A reply that gives
  several letters chooses none. The item's answer is a letter, `B` or `(B)`, or the text
  of one of its `choices`, if it has them; a reply may give that text, too.

  Args:
    strict: Whether only a marked letter counts.

  Returns:
    The grader.
  """

  def grade(reply: str, item: TaskItem) -> float:
    answer = expected_answer(item, 'multiple_choice')
    try:
      choices = choice_texts(item.get('choices'))
    except ValueError as error:
      raise ValueError(f'grader multiple_choice: {error}') from error
    if answer in choices:
      right_letter = letter_at(choices.index(answer))
    else:
      right_letter = only_letter(marked_answer(answer) or answer)
    if not right_letter:
      raise ValueError(
        f'grader multiple_choice: the answer {answer!r} is neither a letter nor one '
        f'of the choices {choices}'
      )
    return float(chosen_letter(reply, choices, strict=strict) == right_letter)

  return grade
