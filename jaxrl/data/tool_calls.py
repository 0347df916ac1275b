"""Tool calls in a reply's text, as chat templates have models write them.

Those of Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any
number. Llama 3's: a reply that is nothing but `{"name": …, "parameters": {…}}`.
"""

import dataclasses
import json
from typing import Any

OPEN, CLOSE = '<tool_call>', '</tool_call>'
BARE = '{'  # how a reply begins that may be a call of Llama's
_PYTHON_TAG = '<|python_tag|>'  # which Llama may put before it


@dataclasses.dataclass(frozen=True)
class Unreadable:
  """A call that is none; `reason` says why, to whoever wrote it."""

  reason: str


Call = dict[str, Any]  # {'name': str, 'arguments': an object}


def parse(text: str) -> tuple[str, list[Call | Unreadable]]:
  """The text before the calls, and the calls in order, those amiss with a reason."""
  before, *blocks = text.split(OPEN)
  if blocks:
    return before.rstrip(), [_call(block) for block in blocks]
  call = _bare(text)
  return (text, []) if call is None else ('', [call])


def begins(text: str) -> bool:
  """Whether a reply that begins like this may turn out to be nothing but a call."""
  return text.lstrip().startswith((BARE, _PYTHON_TAG))


def read(text: str) -> tuple[str, list[Call]]:
  """The text before the calls, and the calls.

  A reply with a call that cannot be read is all text and has none, so that whoever
  sent the tools sees what the model wrote.
  """
  before, calls = parse(text)
  fine = [call for call in calls if not isinstance(call, Unreadable)]
  return (before, fine) if calls and len(fine) == len(calls) else (text, [])


def _bare(text: str) -> Call | None:
  """A whole reply that is a call; one that is anything else is text."""
  body = text.strip().removeprefix(_PYTHON_TAG).lstrip()
  if not (body.startswith(BARE) and body.endswith('}')):
    return None
  try:
    value = json.loads(body)
  except (ValueError, RecursionError):
    return None
  if not isinstance(value, dict) or value.keys() != {'name', 'parameters'}:
    return None
  name, arguments = value['name'], value['parameters']
  if not isinstance(name, str) or not isinstance(arguments, dict):
    return None
  return {'name': name, 'arguments': arguments}


def _call(block: str) -> Call | Unreadable:
  body, closed, _ = block.partition(CLOSE)
  if not closed:
    return Unreadable(f'it does not end with {CLOSE}')
  try:
    value = json.loads(body)
  except (ValueError, RecursionError) as error:
    return Unreadable(f'it is not JSON: {error}')
  if not isinstance(value, dict) or not isinstance(value.get('name'), str):
    return Unreadable('it must be an object with a "name", a string')
  arguments = value.get('arguments', {})
  if not isinstance(arguments, dict):
    return Unreadable('its "arguments" must be an object')
  return {'name': value['name'], 'arguments': arguments}
