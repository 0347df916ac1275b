"""Choices of a row, of which one is right: their texts, and how a question shows them.

| rows of | choices | answer |
|---|---|---|
| MMLU | `choices`, a list | `answer`, a position from 0 |
| ARC, CommonsenseQA, OpenBookQA | `choices`, `text` and `label` | `answerKey` |
| MMLU-Pro | `options`, a list | `answer`, a letter |
| MedQA | `options`, by letter | `answer`, the text |
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

CHOICE_KEYS = ('choices', 'options')
_FILLER = 'N/A'  # which MMLU-Pro fills shorter lists with
_LABEL = re.compile(r'\(?([A-Z])[).:]\s*')


def choice_texts(choices: Any) -> list[str]:
  """Returns the texts of choices, in whichever form a row has them.

  Args:
    choices: A list; a mapping from letters, {'A': 'Rome', …}; lists of `text` and
      `label`; or None.

  Raises:
    ValueError: If they are a text.
  """
  if isinstance(choices, Mapping):
    texts = choices.get('text')
    choices = texts if isinstance(texts, list | tuple) else choices.values()
  if isinstance(choices, str):
    raise ValueError(f'its choices are a text, {choices!r:.60}; give a list')
  texts = [str(choice).strip() for choice in (choices if choices is not None else ())]
  is_labelled = all(
    (match := _LABEL.match(text)) and ord(match[1]) - ord('A') == number
    for number, text in enumerate(texts)
  )
  return [_LABEL.sub('', text, count=1) for text in texts] if is_labelled else texts


def letter_at(position: int) -> str:
  """Returns the letter of a choice: 'A' for position 0."""
  return chr(ord('A') + position)


def show_choices(
  question: object, answer: object, row: Mapping[str, object]
) -> dict[str, Any]:
  """Adds the choices of a row to its question, and makes its answer a letter.

  Args:
    question: The question. The choices are added, each on a line of its own with its
      letter, unless it holds all of them already.
    answer: The answer: a letter, a label, a position from 0 or a text.
    row: The row.

  Returns:
    `question`, `answer` and `choices` if the question is a text, the row has at least
    two choices and the answer is one of them; else nothing.

  Raises:
    ValueError: If the answer is a number in a text, which may count from 0 or from 1.
  """
  key = next((key for key in CHOICE_KEYS if row.get(key) is not None), None)
  choices = row[key] if key else None
  if not isinstance(choices, list | tuple | Mapping) or not isinstance(question, str):
    return {}
  texts = choice_texts(choices)
  while texts and texts[-1] == _FILLER:
    texts.pop()
  # A number among numbers is one of them; among texts it is a position.
  is_value = isinstance(choices, list | tuple) and answer in choices
  name = str(answer) if is_value else answer
  if len(texts) < 2 or not all(texts):
    return {}
  position = _position(name, texts, _labels(choices))
  if position is None:
    return {}
  letter = letter_at(position)
  if all(text in question for text in texts):
    is_letter = isinstance(answer, str) and not answer.strip().isdigit()
    return {} if is_letter else {'answer': letter, 'choices': texts}
  lines = [f'{letter_at(i)}. {text}' for i, text in enumerate(texts)]
  shown = '\n'.join([question.rstrip(), '', *lines])
  return {'question': shown, 'answer': letter, 'choices': texts}


def _labels(choices: object) -> list[str]:
  """Returns the labels that a row gives to its choices; none for a plain list."""
  if not isinstance(choices, Mapping):
    return []
  labels = choices.get('label')
  is_list = isinstance(labels, list | tuple)
  return [str(label).strip() for label in (labels if is_list else choices)]


def _position(
  answer: object, texts: Sequence[str], labels: Sequence[str]
) -> int | None:
  """Returns which of the choices the answer is; None if it is none of them."""
  if isinstance(answer, bool) or not isinstance(answer, int | str):
    return None
  if isinstance(answer, int):
    return answer if 0 <= answer < len(texts) else None
  name = answer.strip()
  for names in (labels, texts, [letter_at(i) for i in range(len(texts))]):
    if name in names:
      return list(names).index(name)
  if name.isascii() and name.isdigit() and int(name) <= len(texts):
    raise ValueError(
      f'its answer, {answer!r}, is none of its choices, and as a text it may count '
      'from 0 or from 1; give a letter, a choice or a number from 0'
    )
  return None
