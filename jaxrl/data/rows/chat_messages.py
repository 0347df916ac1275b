"""Messages from data files are converted here to the form that chat templates take."""

import json
import re
from collections.abc import Mapping
from typing import Any

from jaxrl.data.model_text.chat_template import THOUGHT_KEYS, has_images
from jaxrl.data.row_sources import DataError
from jaxrl.types import Message

ROLE_BY_NAME = {
  'human': 'user',
  'gpt': 'assistant',
  'bot': 'assistant',
  'model': 'assistant',
  'chatgpt': 'assistant',
  'ai': 'assistant',
  'function_call': 'assistant',
  'tool_call': 'assistant',
  'function': 'tool',
  'function_response': 'tool',
  'tool_response': 'tool',
  'observation': 'tool',
  'ipython': 'tool',
}
ROLE_BY_NAME |= {
  role: role for role in ('system', 'developer', 'user', 'assistant', 'tool')
}
_TURN = re.compile(r'(?:^|\n\n)(Human|Assistant): ?')
IMAGE_TYPES = ('image', 'image_url')
IMAGE_MARK = '<image>'  # where a text of a row with a column of images has one
_KEPT_KEYS = ('tool_call_id', 'name')
_THOUGHT_PARTS = ('thinking', 'reasoning')  # types of parts of a content


def parse_json_cell(text: str, what: str) -> Any:
  """Parses a cell that holds JSON text, as CSV and some Parquet files store lists.

  Args:
    text: The JSON text.
    what: What the text should hold, for the error message.

  Returns:
    The parsed value.

  Raises:
    DataError: If the text is not valid JSON.
  """
  try:
    return json.loads(text)
  except json.JSONDecodeError as error:
    raise DataError(f'{what} must be a list or object, or its JSON: {error}') from error


def are_messages(value: object) -> bool:
  """Returns whether a value is a list of messages, by role or by who they are from.

  Args:
    value: The value.
  """
  return (
    isinstance(value, list)
    and bool(value)
    and all(isinstance(x, Mapping) and ('role' in x or 'from' in x) for x in value)
  )


def parse_stored_messages(text: str) -> Any:
  """Returns the messages that a cell holds as JSON text, or else the text.

  Args:
    text: The cell.
  """
  if not text.lstrip().startswith('['):
    return text
  try:
    value = json.loads(text)
  except ValueError:
    return text
  return value if are_messages(value) else text


def as_messages(value: object, role: str) -> list[Message]:
  """Converts a text or a list of messages to a list of messages.

  Args:
    value: A text, or anything that `normalize_messages` takes.
    role: The role of the message if `value` is a text.

  Returns:
    The messages.
  """
  value = parse_stored_messages(value) if isinstance(value, str) else value
  if isinstance(value, str):
    return [{'role': role, 'content': value}]
  return normalize_messages(value)


def normalize_messages(value: object) -> list[Message]:
  """Parses a conversation into messages with role and content.

  Args:
    value: A list of messages with role and content, or with from and value; or its JSON
      text.

  Returns:
    The messages. A message that must not be learned has `'train': False`.

  Raises:
    DataError: If an entry is not a message; the error names its index.
  """
  value = parse_json_cell(value, 'messages') if isinstance(value, str) else value
  if not isinstance(value, list) or not value:
    raise DataError(f'messages must be a list of at least one, not {value!r}'[:200])
  return [_message(message, i) for i, message in enumerate(value)]


def _message(message: object, i: int) -> Message:
  """Returns one message with its role, content and what else templates read."""
  if not isinstance(message, Mapping):
    raise DataError(f'message {i} must be an object, not {type(message).__name__}')
  values = {key: value for key, value in message.items() if value is not None}
  name = str(values.get('role', values.get('from')))
  role = name if name in ROLE_BY_NAME else name.lower()
  content = values.get('content', values.get('value'))
  content, thought = _split_thought(content, values)
  content, calls = _split_calls(content, values, role, i)
  if role not in ROLE_BY_NAME or (content is None and not (calls or thought)):
    raise DataError(
      f'message {i} needs role and content (or from and value), with a role of '
      f'{", ".join(ROLE_BY_NAME)}; it has role {name!r} and the keys '
      f'{", ".join(map(str, values)) or "none"}'
    )
  parsed: Message = {'role': ROLE_BY_NAME[role], 'content': _content(content, i)}
  parsed |= {key: values[key] for key in _KEPT_KEYS if key in values}
  if calls:
    parsed['tool_calls'] = [_call(call) for call in calls]
  if thought:
    parsed['reasoning_content'] = thought
  train = values.get('train', values.get('weight', True))
  if train not in (0, 1):
    raise DataError(f'message {i}: train must be true or false, not {train!r}')
  return parsed if train else parsed | {'train': False}


def _split_thought(content: Any, values: Mapping[str, Any]) -> tuple[Any, str]:
  """Returns a content without its parts of thought, and the thought of a message."""
  texts = [values[key] for key in THOUGHT_KEYS if isinstance(values.get(key), str)]
  if isinstance(content, list):
    of_thought = [
      part
      for part in content
      if isinstance(part, Mapping) and part.get('type') in _THOUGHT_PARTS
    ]
    found = [part.get(part['type'], part.get('text')) for part in of_thought]
    texts += [text for text in found if isinstance(text, str)]
    content = [part for part in content if not any(part is x for x in of_thought)]
  return content, next((text for text in texts if text.strip()), '')


def _split_calls(
  content: object, values: Mapping[str, object], role: str, i: int
) -> tuple[Any, list[Any]]:
  """Returns a content without calls of tools, and the calls of a message.

  Calls are `tool_calls`; OpenAI's earlier `function_call`; or the JSON of a turn that
  ShareGPT's rows ascribe to `function_call`.
  """
  calls = values.get('tool_calls') or ()
  if isinstance(calls, str):
    calls = parse_json_cell(calls, f'message {i}: tool_calls')
  if not isinstance(calls, list | tuple):
    raise DataError(f'message {i}: tool_calls must be a list: {calls!r}'[:200])
  if not calls and isinstance(values.get('function_call'), Mapping):
    calls = [{'type': 'function', 'function': values['function_call']}]
  if not calls and role in ('function_call', 'tool_call') and isinstance(content, str):
    try:
      value = json.loads(content)
    except ValueError:
      return content, []
    found = value if isinstance(value, list) else [value]
    if found and all(isinstance(call, Mapping) and 'name' in call for call in found):
      return None, [{'type': 'function', 'function': call} for call in found]
  return content, list(calls)


def _call(call: Any) -> Any:
  """Returns a tool call with its arguments as an object, as templates expect them."""
  function = call.get('function') if isinstance(call, Mapping) else None
  if not isinstance(function, Mapping):
    return call
  arguments = function.get('arguments')
  if isinstance(arguments, str) and arguments.strip():
    arguments = parse_json_cell(arguments, 'arguments')
  elif not arguments or isinstance(arguments, str):  # as for a call without any
    arguments = {}
  return {**call, 'function': {**function, 'arguments': arguments}}


def _content(content: object, i: int) -> str | list[Message]:
  """Returns the content as text, joining the texts of typed parts.

  If a part is an image, parts are returned. An image that a part only announces is to
  be found in another column, and is None.
  """
  if content is None or isinstance(content, str):
    return content or ''
  parts = content if isinstance(content, list) else [content]
  if any(isinstance(p, Mapping) and p.get('type') in IMAGE_TYPES for p in parts):
    return [_part(part, i) for part in parts]
  texts = [part.get('text') if isinstance(part, Mapping) else part for part in parts]
  known_texts = [text for text in texts if isinstance(text, str)]
  if len(known_texts) < len(texts):
    raise DataError(f'message {i}: its content is not text: {content!r}'[:200])
  return ''.join(known_texts)


def _part(part: object, i: int) -> Message:
  """Returns a part of a content that has images."""
  if isinstance(part, Mapping) and part.get('type') in IMAGE_TYPES:
    from jaxrl.data.images import as_image  # text alone needs none

    value = part.get('image')
    value = part.get('image_url') if value is None else value
    try:
      return {'type': 'image', 'image': None if value is None else as_image(value)}
    except ValueError as error:
      raise DataError(f'message {i}: {error}') from error
  text = part.get('text') if isinstance(part, Mapping) else part
  if not isinstance(text, str):
    raise DataError(f'message {i}: a part is neither text nor image: {part!r}'[:200])
  return {'type': 'text', 'text': text}


def place_images(messages: list[Message], images: Any) -> list[Message]:
  """Returns messages with the images of a column in their places.

  Args:
    messages: The messages. An image belongs where a part announces one, or where a text
      of the user has `<image>`; without either, before the first such text.
    images: The column: a list of what `images.as_image` takes, or one of them; None if
      there is none.

  Returns:
    The messages.

  Raises:
    DataError: If there are more or fewer images than places, or one is broken.
  """
  if not images and not has_images(messages):
    return messages
  from jaxrl.data.images import as_image

  values = images if isinstance(images, list | tuple) else [images] if images else []
  try:
    left = [as_image(value) for value in values]
  except ValueError as error:
    raise DataError(f'images: {error}') from error
  count, placed = len(left), []
  has_places = any(map(_has_places, messages))
  for message in messages:
    if left and not has_places and message['role'] == 'user':
      parts = [{'type': 'image', 'image': image} for image in left]
      message = {**message, 'content': [*parts, *_as_parts(message['content'])]}
      left = []
    elif _has_places(message):
      message = {**message, 'content': _filled(message['content'], left)}
    placed.append(message)
  if left:
    raise DataError(f'{count} images are given, and the messages have fewer places')
  return placed


def _has_places(message: Message) -> bool:
  """Returns whether a message has places for the images of a column."""
  content = message.get('content')
  if isinstance(content, list):
    return any(part.get('image', '') is None for part in content)
  return message['role'] == 'user' and IMAGE_MARK in str(content)


def _as_parts(content: Any) -> list[Message]:
  return [{'type': 'text', 'text': content}] if isinstance(content, str) else content


def _filled(content: object, left: list[Any]) -> list[Message]:
  """Returns a content with images, which are taken from the beginning of `left`."""
  parts: list[Message] = []
  for part in content if isinstance(content, list) else []:
    parts.append(part if part.get('image', '') is not None else _take(left))
  if isinstance(content, str):
    first, *others = content.split(IMAGE_MARK)
    pieces = [first, *(x for text in others for x in (None, text))]
    for piece in pieces:
      if piece is None:
        parts.append(_take(left))
      elif piece:
        parts.append({'type': 'text', 'text': piece})
  return parts


def _take(left: list[Any]) -> Message:
  if not left:
    raise DataError('the messages have places for more images than are given')
  return {'type': 'image', 'image': left.pop(0)}


def parse_transcript(text: str) -> list[Message]:
  """Splits a text of `Human: …` and `Assistant: …` paragraphs into messages.

  Args:
    text: The transcript.

  Returns:
    The messages, with the roles user and assistant.

  Raises:
    DataError: If the text does not begin with such a paragraph.
  """
  before, *parts = _TURN.split(text)
  if before.strip() or not parts:
    raise DataError(
      'there is no prompt, and the answers are neither lists of messages nor '
      f"texts of 'Human: …' and 'Assistant: …': {text!r}"[:300]
    )
  roles = ['user' if name == 'Human' else 'assistant' for name in parts[::2]]
  return [
    {'role': role, 'content': content}
    for role, content in zip(roles, parts[1::2], strict=True)
  ]


def shared_prefix_length(one: list[Message], other: list[Message]) -> int:
  """Returns how many leading messages two conversations have in common.

  Args:
    one: A conversation.
    other: Another conversation.

  Returns:
    The number of equal messages at the start; 'train' flags are ignored.
  """
  stripped = [[{**m, 'train': None} for m in side] for side in (one, other)]
  pairs = enumerate(zip(*stripped, strict=False))
  return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
