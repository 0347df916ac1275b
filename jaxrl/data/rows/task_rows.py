"""Task rows give a question and an answer, under the keys of many frameworks.

| rows of | question | answer |
|---|---|---|
| jaxrl, GSM8K | `question` | `answer` |
| verl | `prompt`, a list of messages | `reward_model.ground_truth` |
| TRL, OpenRLHF | `prompt`, text or messages | `solution`, `completion` and others |
| MATH, Tinker cookbook | `problem` | `answer`, `solution` |
| Alpaca | `instruction` with `input` | `output` |
| MBPP | `text` beside `test_list`, or `prompt` | `test_list` |
| MMLU, ARC | `question` with `choices` or `options` | `answer`, `answerKey` |
| ShareGPT, OpenAI | `conversations` or `messages` before the last reply | that reply |
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxrl.data.row_sources import (
  SOURCE_KEY,
  DataError,
  Row,
  describe_row,
  get_field,
  has_empty_mark,
  has_field,
  is_empty,
)
from jaxrl.data.rows.chat_messages import (
  are_messages,
  normalize_messages,
  parse_stored_messages,
)
from jaxrl.data.rows.row_choices import show_choices
from jaxrl.options import Options, option
from jaxrl.types import Message

CONVERSATION_KEYS = ('messages', 'conversations')
# For rows without the usual name: the first of these that a source's first row has.
OTHER_KEYS = {
  'question': ('prompt', 'problem', 'instruction', *CONVERSATION_KEYS),
  'answer': (
    *('reward_model.ground_truth', 'ground_truth', 'final_answer', 'expected_answer'),
    *('gold_answer', 'solution', 'completion', 'response', 'output'),
    *('answerKey', 'test_list', *CONVERSATION_KEYS),
  ),
}
# Keys that say what they are only beside another one: a `text` alone is not a question.
_KEYS_BESIDE = {'question': {'test_list': 'text'}}


@dataclasses.dataclass(frozen=True)
class RowColumns(Options):
  """Columns of tables, or keys of objects, in which rows hold what a run reads.

  A dot leads into an object, as in 'extra_info.question'. Where a column is '', the
  usual ones of `jaxrl.data.rows.row_formats` are tried.
  """

  question: str = option(
    'question',
    "Column of a task's question, which may also be a conversation's prompt.",
  )
  answer: str = option('answer', "Column of a task's answer; '' if rows have none.")
  solution: str = option('solution', 'Column of a written solution or response.')
  messages: str = option('', "Column of a conversation; '' tries the usual ones.")
  prompt: str = option('', "Column of a prompt; '' tries the usual ones.")
  input: str = option('', "Column of what follows an instruction; '' is 'input'.")
  response: str = option('', "Column of a response; '' tries the usual ones.")
  chosen: str = option('', "Column of the better answer; '' tries the usual ones.")
  rejected: str = option('', "Column of the worse answer; '' tries the usual ones.")
  text: str = option('', "Column of a plain text; '' is 'text'.")
  reward: str = option('', "Column of a row's reward; '' is 'reward'.")
  system: str = option('', "Column of the system message; '' is 'system'.")
  tools: str = option('', "Column of the tools; '' is 'tools'.")
  tag: str = option('', "Column of a row's environment tag; '' is 'tag'.")
  images: str = option('', "Column of the images; '' is 'images'.")


USUAL_COLUMNS = RowColumns()


class TaskReader:
  """Finds the question and the answer of a row.

  Args:
    question_key: The key of the question, or its path within objects; '' for none.
    answer_key: The key of the answer, or its path; '' for none.
  """

  def __init__(self, question_key: str, answer_key: str):
    self._wanted = {'question': question_key, 'answer': answer_key}
    self._keys: dict[Any, dict[str, str]] = {}  # by source

  @property
  def has_questions(self) -> bool:
    """Returns whether rows have questions."""
    return bool(self._wanted['question'])

  def check(self, rows: Sequence[Row], name: str) -> None:
    """Checks that each row has a usable question and answer.

    Args:
      rows: The rows.
      name: What they are called, for messages.

    Raises:
      DataError: If one has not; the error names its file and number.
    """
    for i, row in enumerate(rows):
      try:
        self.read(row)
      except ValueError as error:
        raise DataError(f'{describe_row(rows, i, name)}: {error}') from error

  def read(self, row: Row) -> Row:
    """Returns a row with its 'question' and 'answer'.

    Args:
      row: The row.

    Raises:
      DataError: If one is missing, empty or unusable.
    """
    item, keys = dict(row), self._keys_of(row)
    if key := keys['question']:
      item['question'] = _question(row, key)
    if key := keys['answer']:
      item['answer'] = _answer(row, key)
    if all(keys.values()):
      item |= _with_choices(item['question'], item['answer'], row)
    return item

  def _keys_of(self, row: Row) -> dict[str, str]:
    source = row.get(SOURCE_KEY)
    if source not in self._keys:
      self._keys[source] = {
        name: _first_key(row, name, key) for name, key in self._wanted.items()
      }
    return self._keys[source]


def _with_choices(question: Any, answer: object, row: Row) -> Row:
  """Returns what changes when the question, or its last message, shows the choices."""
  if not are_messages(question):
    return show_choices(question, answer, row)
  *before, last = question
  shown = show_choices(last['content'], answer, row)
  if 'question' in shown:
    shown['question'] = [*before, {**last, 'content': shown['question']}]
  return shown


def _first_key(row: Row, name: str, key: str) -> str:
  if key != name:
    return key
  beside = _KEYS_BESIDE.get(name, {}).items()
  keys = (key, *OTHER_KEYS[name], *(k for other, k in beside if has_field(row, other)))
  return next((k for k in keys if has_field(row, k)), key)


def _value(row: Row, key: str, name: str) -> Any:
  if not has_field(row, key):
    raise DataError(
      f'no key {key!r}; its keys are {", ".join(map(str, row)) or "none"}: set '
      f'columns.{name} to the one that holds the {name}'
    )
  value = get_field(row, key)
  if is_empty(value):
    raise DataError(f'its {name}, {key}, is empty ({value!r})')
  return value


def _question(row: Row, key: str) -> Any:
  """Returns the question: a text, messages, or parts of a message with images."""
  value = _value(row, key, 'question')
  # Others may be any object.
  is_usual = key in ('question', 'text', *OTHER_KEYS['question'])
  if is_usual and isinstance(value, bool | int | float):
    raise DataError(f'its question, {key}, is {value!r}, not a text or messages')
  if isinstance(value, str):
    extra = row.get('input')
    if key == 'instruction' and isinstance(extra, str) and extra.strip():
      return f'{value}\n\n{extra}'
    value = parse_stored_messages(value)
  if not are_messages(value):
    return value
  messages = normalize_messages(value)
  if key in CONVERSATION_KEYS:
    messages = messages[: _last_reply(messages)]
  if not messages or messages[-1]['role'] == 'assistant':
    raise DataError(f'its question, {key}, ends with a message of the assistant')
  if all(is_empty(message['content']) for message in messages):
    raise DataError(f'its question, {key}, is empty: no message has a content')
  is_plain = len(messages) == 1 and messages[0]['role'] == 'user'
  return messages[0]['content'] if is_plain else messages


def _answer(row: Row, key: str) -> Any:
  """Returns the answer: a text, a number or an object, out of messages if need be."""
  value = _value(row, key, 'answer')
  if isinstance(value, str) and key in CONVERSATION_KEYS:
    value = parse_stored_messages(value)
  if are_messages(value):
    messages = normalize_messages(value)
    last = _last_reply(messages)
    if last == len(messages) or is_empty(messages[last]['content']):
      raise DataError(f'its answer, {key}, has no reply of the assistant')
    return messages[last]['content']
  if isinstance(value, list | tuple) and len(value) == 1 and isinstance(value[0], str):
    value = value[0]  # lists of tests and of other objects stay lists
  if has_empty_mark(value):
    raise DataError(
      f'its answer, {key}, ends with a mark and no answer ({value!r:.60})'
    )
  return value


def _last_reply(messages: Sequence[Message]) -> int:
  """Returns the position of the last message of the assistant; else their number."""
  replies = [i for i, m in enumerate(messages) if m['role'] == 'assistant']
  return replies[-1] if replies else len(messages)
