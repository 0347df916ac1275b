"""Conversations that come again, recognised by the bytes that they came in.

A client sends the whole conversation with every turn. What a session has sent before is
neither read as JSON nor checked again, so that a turn costs what is new in it.
"""

import dataclasses
import json
import re
import secrets
from collections import deque
from typing import Any

from jaxrl.types import Message

KEPT = 4  # conversations of a session that may take turns
_MESSAGES = re.compile(r'(?<!\\)"messages"\s*:\s*\[\s*')
_HALF = re.compile(r'\\u[dD][89a-fA-F]')  # of a letter beyond 16 bits, as JSON has it
_SPACE = ' \t\n\r'  # as JSON has it


@dataclasses.dataclass(frozen=True, eq=False)
class Known:
  """text: a body up to the end of its last message. start: where the first begins.
  messages: what those are, in the form that they are used in.
  """

  text: str
  start: int
  messages: list[Message]


class Seen:
  """What a session's latest requests began with."""

  def __init__(self) -> None:
    self._latest: deque[Known] = deque(maxlen=KEPT)
    self._mark = secrets.token_hex(16)  # no client can have it in a body

  def read(self, text: str) -> tuple[Any, Known | None]:
    """The value of a JSON text, and what is known of it.

    The value's `messages` are then the new ones alone. Raises ValueError.
    """
    for known in reversed(self._latest):
      end = len(known.text)
      if not text.startswith(known.text) or text[end : end + 1] not in (',', ']'):
        continue
      body = loads(f'{text[: known.start]}"{self._mark}"{text[end:]}')
      found = body.get('messages')
      # The mark is elsewhere if these were not the body's own messages.
      if isinstance(found, list) and found[:1] == [self._mark]:
        return {**body, 'messages': found[1:]}, known
    return loads(text), None

  def keep(self, text: str, known: Known | None, messages: list[Message]) -> None:
    """Remembers that the body `text` has `messages`. known: as `read` gave it."""
    if known is None:
      found = _MESSAGES.search(text)
      if found is None:
        return
      start, end = found.end(), _end(text, text.index('[', found.start()))
    else:
      start, before = known.start, len(known.text)
      end = before + _end(f'[0{text[before:]}', 0) - 2
      if known in self._latest:  # else someone else has gone on from it
        self._latest.remove(known)
    self._latest.append(Known(text[:end], start, messages))


def loads(text: str) -> Any:
  """What a JSON text says. Raises ValueError, also for halves of surrogate pairs."""
  try:
    value = json.loads(text, parse_constant=_no_constant)
    if _HALF.search(text):
      json.dumps(value, ensure_ascii=False).encode()
  except RecursionError as error:
    raise ValueError('it is too deep') from error
  return value


def _no_constant(name: str) -> None:
  raise ValueError(f'{name} is not JSON')


def _end(text: str, start: int) -> int:
  """Where the last entry ends of the array that begins at `start`."""
  _, end = json.JSONDecoder().raw_decode(text, start)
  return len(text[: end - 1].rstrip(_SPACE)) if text[end - 2] in _SPACE else end - 1
