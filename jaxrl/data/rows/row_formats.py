"""Row formats: conversations, pairs and texts are recognised by the keys of their rows.

| format | a row has |
|---|---|
| messages | `messages` (role, content) or `conversations` (from, value); or else a |
| | prompt and a response: prompt, question, problem or instruction (with an input), |
| | and solution, response, completion or output, each a text or a list of messages |
| preference | chosen and rejected: texts or messages after a prompt; or two whole |
| | conversations with a common start, as messages or as `Human: … Assistant: …`; or |
| | OpenAI's input, preferred_output and non_preferred_output |
| text | text |

A row may also have `system` (a text), `tools` (as chat templates take them), `images`
(a list; see `chat_messages.place_images`), `tag` and `reward`. Rows of messages may
have `extras`, which maps names to lists with one value per token, such as a teacher's
logprobs. A message's `"train": false` (or `"weight": 0`) leaves a turn out of training.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl.data.chat_tokenizer import has_images
from jaxrl.data.row_sources import DataError, Row, get_field, has_field, is_empty
from jaxrl.data.rows import chat_messages
from jaxrl.data.rows.task_rows import USUAL_COLUMNS, RowColumns
from jaxrl.types import Message

_MAX_FLOAT32 = 3.4028234663852886e38
DATA_FORMATS = ('messages', 'preference', 'text')


class RowFormat:
  """Knows under which keys a row holds its prompt, response, messages and so on.

  Args:
    columns: The columns.
    system_prompt: The system message of conversations that have none.
  """

  def __init__(self, columns: RowColumns = USUAL_COLUMNS, *, system_prompt: str = ''):
    self._names: dict[str, tuple[str, ...]] = {
      'messages': ('messages', 'conversations'),
      'prompt': (columns.question, 'prompt', 'instruction', 'problem'),
      'input': ('input',),
      'response': (columns.solution, 'response', 'completion', 'output'),
      'chosen': ('chosen', 'preferred_output'),
      'rejected': ('rejected', 'non_preferred_output'),
      'text': ('text',),
      'reward': ('reward',),
      'system': ('system',),
      'tools': ('tools',),
      'tag': ('tag',),
      'images': ('images',),
    }
    own_keys = {name: getattr(columns, name) for name in self._names}
    self._custom_keys = {name: key for name, key in own_keys.items() if key}
    self._names |= {name: (key,) for name, key in self._custom_keys.items()}
    self._system_prompt = system_prompt

  def find(self, row: Row, name: str) -> Any:
    """Returns what the row holds under one of the keys for `name`.

    Args:
      row: The row.
      name: What to look for, such as 'prompt'.

    Returns:
      The value, or None if there is none.
    """
    values = (get_field(row, key) for key in self._names[name])
    return next((value for value in values if value is not None), None)

  def conversation(self, row: Row) -> list[Message]:
    """Returns the messages of a row in the form that chat templates take.

    Args:
      row: The row.

    Returns:
      The messages.

    Raises:
      DataError: If the row holds no conversation.
    """
    messages = self.find(row, 'messages')
    has_custom_keys = any(
      name in self._custom_keys and has_field(row, self._custom_keys[name])
      for name in ('prompt', 'response')
    )
    if messages is not None and not has_custom_keys:
      return _checked(self._opened(row, chat_messages.normalize_messages(messages)))
    prompt, response = self.find(row, 'prompt'), self.find(row, 'response')
    if prompt is None or response is None:
      raise self._missing(row, 'messages', 'prompt', 'response')
    _check_content('response', response)
    reply = chat_messages.as_messages(response, 'assistant')
    return _checked(self._opened(row, [*self._prompt(row), *reply]))

  def pair(self, row: Row) -> tuple[list[Message], list[Message]]:
    """Returns the chosen and the rejected conversation of a row.

    Only the answers are marked for training.

    Args:
      row: The row.

    Returns:
      A tuple of the chosen and the rejected conversation.

    Raises:
      DataError: If one is missing or they answer different prompts.
    """
    sides = [self.find(row, name) for name in ('chosen', 'rejected')]
    if None in sides:
      raise self._missing(row, 'chosen', 'rejected')
    for name, side in zip(('chosen', 'rejected'), sides, strict=True):
      _check_content(name, side)
    prefix = self._pair_prompt(row)
    chosen, rejected = (_answer(side, prefix) for side in sides)
    num_shared = chat_messages.shared_prefix_length(chosen, rejected)
    for side, name in ((chosen, 'chosen'), (rejected, 'rejected')):
      if len(side) == num_shared or side[num_shared]['role'] != 'assistant':
        raise DataError(
          'chosen and rejected must share their prompt and then differ in the '
          f'answer; after {num_shared} equal messages, {name} '
          + (
            'ends'
            if len(side) == num_shared
            else f'has one of {side[num_shared]["role"]}'
          )
        )
    opening = [message | {'train': False} for message in chosen[:num_shared]]
    one, other = ([*opening, *side[num_shared:]] for side in (chosen, rejected))
    return _checked(self._opened(row, one)), _checked(self._opened(row, other))

  def text(self, row: Row) -> str:
    """Returns the text of a row.

    Args:
      row: The row.

    Returns:
      The text.

    Raises:
      DataError: If the row has no text.
    """
    text = self.find(row, 'text')
    if not isinstance(text, str):
      raise self._missing(row, 'text')
    return text

  def reward(self, row: Row, *, required: bool = False) -> float:
    """Returns the reward of a row.

    Args:
      row: The row.
      required: Whether a missing reward is an error.

    Returns:
      The reward; 0 if the row has none.

    Raises:
      DataError: If the reward is required and missing, or is not a finite number in
        float32.
    """
    reward = self.find(row, 'reward')
    if reward is None and not required:
      return 0.0
    if reward is None:
      raise self._missing(row, 'reward')
    try:
      value = float(reward)
    except (TypeError, ValueError, OverflowError) as error:
      raise DataError(f'the reward is not a number: {reward!r:.80}') from error
    if not abs(value) <= _MAX_FLOAT32:
      raise DataError(f'the reward is not a finite number in float32: {value}')
    return value

  def tools(self, row: Row) -> list[Any]:
    """Returns the tools that the conversation's system message announces.

    Args:
      row: The row.

    Returns:
      The tools' JSON schemas.
    """
    tools = self.find(row, 'tools')
    if tools is None and isinstance(given := self.find(row, 'input'), Mapping):
      tools = given.get('tools')
    tools = (
      chat_messages.parse_json_cell(tools, 'tools')
      if isinstance(tools, str) and tools
      else tools
    )
    return list(tools or ())

  def extras(self, row: Row) -> Row:
    """Returns the additional per-token values of a row's conversation.

    Args:
      row: The row.

    Returns:
      Lists of one value per token, by name.

    Raises:
      DataError: If `extras` is not an object.
    """
    extras = row.get('extras') or {}
    if not isinstance(extras, Mapping):
      raise DataError(f'extras is {type(extras).__name__}, not an object')
    return dict(extras)

  def tag(self, row: Row) -> str:
    """Returns the tag of a row, or ''.

    Args:
      row: The row.

    Returns:
      The tag.
    """
    return str(self.find(row, 'tag') or '')

  def strings(self, row: Row) -> Iterator[str]:
    """Yields every text of a row that a model may meet, whatever the data format.

    Args:
      row: The row.

    Yields:
      The texts.
    """
    if tools := self.find(row, 'tools'):
      yield _as_text(tools)
    for name in ('messages', 'prompt', 'response', 'chosen', 'rejected', 'text'):
      value = self.find(row, name)
      if isinstance(value, str):
        yield value
      elif isinstance(value, list):
        for message in value:
          if isinstance(message, Mapping):
            if has_images([dict(message)]):
              yield from (str(part.get('text', '')) for part in message['content'])
            else:
              yield str(message.get('content') or message.get('value') or '')
            if calls := message.get('tool_calls'):
              yield _as_text(calls)

  def _prompt(self, row: Row) -> list[Message]:
    prompt = self.find(row, 'prompt')
    _check_content('prompt', prompt)
    extra_input = self.find(row, 'input')
    takes_input = 'input' in self._custom_keys or prompt == row.get('instruction')
    if isinstance(prompt, str) and extra_input and takes_input:
      prompt = f'{prompt}\n\n{extra_input}'
    return [
      message | {'train': False}
      for message in chat_messages.as_messages(prompt, 'user')
    ]

  def _pair_prompt(self, row: Row) -> list[Message]:
    """Returns what stands before both answers of a pair, if the row has it."""
    if self.find(row, 'prompt') is not None:
      return self._prompt(row)
    messages = self.find(row, 'messages')
    given = self.find(row, 'input')
    if messages is None and isinstance(given, Mapping):  # as OpenAI has it
      messages = given.get('messages')
    if messages is None:
      return []
    prompt = chat_messages.normalize_messages(messages)
    return prompt if prompt[-1]['role'] != 'assistant' else []

  def _opened(self, row: Row, messages: list[Message]) -> list[Message]:
    """Puts images in their places, and a system message first if there is none yet."""
    messages = chat_messages.place_images(messages, self.find(row, 'images'))
    system = self.find(row, 'system') or self._system_prompt
    if not system or messages[0]['role'] in ('system', 'developer'):
      return messages
    return [{'role': 'system', 'content': str(system)}, *messages]

  def _missing(self, row: Row, *names: str) -> DataError:
    keys = [' or '.join(map(repr, dict.fromkeys(self._names[name]))) for name in names]
    wanted = '; '.join(f'{n}: {k}' for n, k in zip(names, keys, strict=True))
    return DataError(
      f'the row lacks a key ({wanted}). Its keys are '
      f'{", ".join(map(str, row)) or "none"}: set '
      f'dataset.columns.{names[-1]}=KEY to use another key'
    )


def _check_content(name: str, value: object) -> None:
  """Raises DataError for a prompt or an answer that says nothing."""
  if is_empty(value):
    raise DataError(f'its {name} is empty ({value!r})')


def _checked(messages: list[Message]) -> list[Message]:
  """Returns messages; raises DataError if one that is to be learned says nothing."""
  for i, message in enumerate(messages):
    has_more = message.get('tool_calls') or message.get('reasoning_content')
    is_learned = message['role'] == 'assistant' and message.get('train', True)
    if is_learned and not has_more and is_empty(message['content']):
      raise DataError(
        f"message {i}, of the assistant, is empty: fill it, or give it 'train': false"
      )
  if all(is_empty(m['content']) for m in messages if m['role'] != 'assistant'):
    raise DataError('no message before the replies has a content')
  return messages


def _answer(side: object, prompt: list[Message]) -> list[Message]:
  """Returns the full conversation of one side of a pair."""
  side = chat_messages.parse_stored_messages(side) if isinstance(side, str) else side
  if isinstance(side, str):
    if prompt:
      return [*prompt, {'role': 'assistant', 'content': side}]
    return chat_messages.parse_transcript(side)
  side = [side] if isinstance(side, Mapping) else side
  turns = chat_messages.normalize_messages(side)
  role_contents = [(turn['role'], turn['content']) for turn in turns]
  if prompt and turns[0]['role'] == 'assistant':
    return [*prompt, *turns]
  if prompt and (prompt[-1]['role'], prompt[-1]['content']) not in role_contents:
    raise DataError(
      'an answer starts neither with an assistant message nor with the prompt, '
      f'{prompt[-1]["content"]!r}'[:200]
    )
  return turns


def _as_text(value: object) -> str:
  """Returns a cell as a chat template may write it."""
  if isinstance(value, str):
    return value
  return json.dumps(value, ensure_ascii=False, default=str)
