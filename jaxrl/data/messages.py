"""Messages as files have them, brought to the form that chat templates take."""

import json
import re
from collections.abc import Mapping
from typing import Any

from jaxrl.data.sources import DataError
from jaxrl.types import Message

ROLES = {
  'human': 'user',
  'gpt': 'assistant',
  'bot': 'assistant',
  'model': 'assistant',
  'chatgpt': 'assistant',
  'function_call': 'assistant',
  'function_response': 'tool',
  'observation': 'tool',
}
ROLES |= {role: role for role in ('system', 'developer', 'user', 'assistant', 'tool')}
_TURN = re.compile(r'(?:^|\n\n)(Human|Assistant): ?')
_KEPT = ('tool_calls', 'tool_call_id', 'name', 'reasoning_content')


def parsed(text: str, what: str) -> Any:
  """What a text of JSON holds; CSV and some Parquet files have lists as such."""
  try:
    return json.loads(text)
  except json.JSONDecodeError as error:
    raise DataError(f'{what} must be a list or object, or its JSON: {error}') from error


def turns(value: Any, role: str) -> list[Message]:
  """A text as one message of `role`; a list of messages as `messages` has it."""
  if isinstance(value, str):
    return [{'role': role, 'content': value}]
  return messages(value)


def messages(value: Any) -> list[Message]:
  """Role and content of each message; 'train' is there, and false, where not learned.

  value: a list of messages by role and content, or by from and value; or its JSON.
  Raises DataError naming the message that is none.
  """
  value = parsed(value, 'messages') if isinstance(value, str) else value
  if not isinstance(value, list) or not value:
    raise DataError(f'messages must be a list of at least one, not {value!r}'[:200])
  return [_message(message, i) for i, message in enumerate(value)]


def _message(message: Any, i: int) -> Message:
  """One message with role and content, and what else templates and masks read."""
  if not isinstance(message, Mapping):
    raise DataError(f'message {i} must be an object, not {type(message).__name__}')
  there = {key: value for key, value in message.items() if value is not None}
  role = str(there.get('role', there.get('from')))
  content = there.get('content', there.get('value'))
  if role not in ROLES or (content is None and not there.get('tool_calls')):
    raise DataError(
      f'message {i} needs role and content (or from and value), with a role of '
      f'{", ".join(ROLES)}; it has role {role!r} and the keys '
      f'{", ".join(map(str, there)) or "none"}'
    )
  made: Message = {'role': ROLES[role], 'content': _content(content, i)}
  made |= {key: there[key] for key in _KEPT if key in there}
  if 'tool_calls' in made:
    made['tool_calls'] = [_call(call) for call in made['tool_calls']]
  train = there.get('train', there.get('weight', True))
  if train not in (0, 1):
    raise DataError(f'message {i}: train must be true or false, not {train!r}')
  return made if train else made | {'train': False}


def _call(call: Any) -> Any:
  """A tool call whose arguments are an object, as templates want them, and not text."""
  function = call.get('function') if isinstance(call, Mapping) else None
  if not isinstance(function, Mapping) or not isinstance(
    function.get('arguments'), str
  ):
    return call
  return {
    **call,
    'function': {**function, 'arguments': parsed(function['arguments'], 'arguments')},
  }


def _content(content: Any, i: int) -> str:
  """A text, or the texts of typed parts joined."""
  if content is None or isinstance(content, str):
    return content or ''
  parts = content if isinstance(content, list) else [content]
  texts = [part.get('text') if isinstance(part, Mapping) else part for part in parts]
  words = [text for text in texts if isinstance(text, str)]
  if len(words) < len(texts):
    raise DataError(f'message {i}: its content is not text: {content!r}'[:200])
  return ''.join(words)


def transcript(text: str) -> list[Message]:
  """The turns of a text of `Human: …` and `Assistant: …` paragraphs as messages."""
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


def common(one: list[Message], other: list[Message]) -> int:
  """How many messages two conversations start with alike."""
  said = [[{**m, 'train': None} for m in side] for side in (one, other)]
  pairs = enumerate(zip(*said, strict=False))
  return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
