"""RequestCache recognizes conversations that a client sends again, by their bytes.

A client sends the whole conversation with every turn. What a session has sent before is
neither parsed nor checked again, so that the cost of a turn is that of its new part.
"""

import dataclasses
import json
import re
import secrets
from collections import deque
from typing import Any

from jaxrl.types import Message

MAX_CACHED = 4  # conversations of one session that may alternate
_MESSAGES_START = re.compile(r'(?<!\\)"messages"\s*:\s*\[\s*')
# Half of a surrogate pair, as JSON escapes letters beyond 16 bits.
_SURROGATE = re.compile(r'\\u[dD][89a-fA-F]')
_JSON_SPACE = ' \t\n\r'


@dataclasses.dataclass(frozen=True, eq=False)
class CachedPrefix:
  """Holds the beginning of a request that was parsed before.

  Attributes:
    text: The body up to the end of its last message.
    start: Where the first message begins.
    messages: The parsed messages.
  """

  text: str
  start: int
  messages: list[Message]


class RequestCache:
  """Keeps the beginnings of a session's latest requests."""

  def __init__(self) -> None:
    """Creates an empty cache."""
    self._prefixes: deque[CachedPrefix] = deque(maxlen=MAX_CACHED)
    # Stands for the cached messages while the rest is parsed; no client can know it.
    self._placeholder = secrets.token_hex(16)

  def read(self, text: str) -> tuple[Any, CachedPrefix | None]:
    """Parses a JSON text without the part that is cached.

    Args:
      text: The request's body.

    Returns:
      The value, whose `messages` are the new ones alone if the second value, the cached
      beginning of the request, is not None.

    Raises:
      ValueError: If the text is not JSON.
    """
    for prefix in reversed(self._prefixes):
      end = len(prefix.text)
      if not text.startswith(prefix.text) or text[end : end + 1] not in (',', ']'):
        continue
      body = parse_strict_json(
        f'{text[: prefix.start]}"{self._placeholder}"{text[end:]}'
      )
      messages = body.get('messages')
      # The placeholder is elsewhere if these were not the body's own messages.
      if isinstance(messages, list) and messages[:1] == [self._placeholder]:
        return {**body, 'messages': messages[1:]}, prefix
    return parse_strict_json(text), None

  def store(
    self, text: str, prefix: CachedPrefix | None, messages: list[Message]
  ) -> None:
    """Remembers the messages of a request.

    Args:
      text: The request's body.
      prefix: Its cached beginning, as `read` returned it.
      messages: All parsed messages of the request.
    """
    if prefix is None:
      match = _MESSAGES_START.search(text)
      if match is None:
        return
      start = match.end()
      end = _end_of_last_entry(text, text.index('[', match.start()))
    else:
      start, prefix_length = prefix.start, len(prefix.text)
      end = prefix_length + _end_of_last_entry(f'[0{text[prefix_length:]}', 0) - 2
      if prefix in self._prefixes:  # else another request has continued it meanwhile
        self._prefixes.remove(prefix)
    self._prefixes.append(CachedPrefix(text[:end], start, messages))


def parse_strict_json(text: str) -> Any:
  """Parses JSON strictly.

  Args:
    text: The JSON text.

  Returns:
    Its value.

  Raises:
    ValueError: If it is not JSON, nested too deeply, or has half of a surrogate pair.
  """
  try:
    value = json.loads(text, parse_constant=_refuse_constant)
    if _SURROGATE.search(text):
      json.dumps(value, ensure_ascii=False).encode()
  except RecursionError as error:
    raise ValueError('it is nested too deeply') from error
  return value


def _refuse_constant(name: str) -> None:
  raise ValueError(f'{name} is not JSON')


def _end_of_last_entry(text: str, start: int) -> int:
  """Returns where the last entry ends of the array that begins at `start`."""
  _, end = json.JSONDecoder().raw_decode(text, start)
  if text[end - 2] in _JSON_SPACE:
    return len(text[: end - 1].rstrip(_JSON_SPACE))
  return end - 1
