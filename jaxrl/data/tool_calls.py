"""Tool calls are parsed here from the text of a reply.

Hermes and Qwen write any number of `<tool_call>{"name": …, "arguments":
{…}}</tool_call>`. Llama 3 writes a reply that consists of `{"name": …, "parameters":
{…}}` alone.
"""

import dataclasses
import json
from typing import Any

OPEN_TAG, CLOSE_TAG = '<tool_call>', '</tool_call>'
JSON_START = '{'  # how a reply begins that may be a call of Llama's
_PYTHON_TAG = '<|python_tag|>'  # which Llama may put before it


@dataclasses.dataclass(frozen=True)
class InvalidToolCall:
  """A tool call that could not be parsed.

  Attributes:
    reason: Why, in words for the model that wrote it.
  """

  reason: str


ToolCall = dict[str, Any]  # {'name': str, 'arguments': an object}


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall | InvalidToolCall]]:
  """Splits a reply into its text and its tool calls.

  Args:
    text: The reply.

  Returns:
    The text before the calls, and the calls in order; an unreadable call is an
    InvalidToolCall.
  """
  before, *blocks = text.split(OPEN_TAG)
  if blocks:
    return before.rstrip(), [_parse_block(block) for block in blocks]
  call = _parse_llama_call(text)
  return (text, []) if call is None else ('', [call])


def may_be_tool_call(text: str) -> bool:
  """Returns whether a reply that begins like this may be nothing but a tool call.

  Args:
    text: The beginning of the reply.

  Returns:
    True if the text could still become a call in Llama's form.
  """
  return text.lstrip().startswith((JSON_START, _PYTHON_TAG))


def extract_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
  """Splits a reply into its text and its tool calls, all or none.

  A reply with an unreadable call is returned as text without calls, so that whoever
  supplied the tools sees what the model wrote.

  Args:
    text: The reply.

  Returns:
    The text before the calls, and the calls.
  """
  before, calls = parse_tool_calls(text)
  valid = [call for call in calls if not isinstance(call, InvalidToolCall)]
  return (before, valid) if calls and len(valid) == len(calls) else (text, [])


def _parse_llama_call(text: str) -> ToolCall | None:
  """Returns the call if the whole reply is one, else None."""
  body = text.strip().removeprefix(_PYTHON_TAG).lstrip()
  if not (body.startswith(JSON_START) and body.endswith('}')):
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


def _parse_block(block: str) -> ToolCall | InvalidToolCall:
  body, closed, _ = block.partition(CLOSE_TAG)
  if not closed:
    return InvalidToolCall(f'it does not end with {CLOSE_TAG}')
  try:
    value = json.loads(body)
  except (ValueError, RecursionError) as error:
    return InvalidToolCall(f'it is not JSON: {error}')
  if not isinstance(value, dict) or not isinstance(value.get('name'), str):
    return InvalidToolCall('it must be an object with a "name", a string')
  arguments = value.get('arguments', {})
  if not isinstance(arguments, dict):
    return InvalidToolCall('its "arguments" must be an object')
  return {'name': value['name'], 'arguments': arguments}
