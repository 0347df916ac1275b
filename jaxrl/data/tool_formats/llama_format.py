"""Llama 3 writes a reply that is a JSON object, or several, and nothing else."""

import re
from collections.abc import Sequence
from typing import Any

from jaxrl.data.tool_formats.json_formats import HERMES
from jaxrl.data.tool_formats.tool_format import (
  Calls,
  InvalidToolCall,
  MalformedCallError,
  ToolCall,
  ToolFormat,
  Tools,
  dump_json,
  read_call,
  read_json,
  skip_space,
)

PYTHON_TAG = '<|python_tag|>'
_END = re.compile(r'\s*(?:<\|eom_id\|>|<\|eot_id\|>)\s*$')
_BEGUN = re.compile(r'\[?\s*\{\s*"(?:name"\s*:|type"\s*:\s*"function)')


def _read_values(text: str) -> list[Any]:
  """Reads JSON objects with `;` between them, or one list of them."""
  value, at = read_json(text, 0)
  values = value if isinstance(value, list) else [value]
  while (at := skip_space(text, at)) < len(text):
    if text[at] != ';' or isinstance(value, list):
      raise MalformedCallError('other text follows it')
    another, at = read_json(text, at + 1)
    values.append(another)
  return values


def _is_call(value: Any) -> bool:
  if not isinstance(value, dict) or not isinstance(value.get('name'), str):
    return False
  keys = value.keys() - ({'type'} if value.get('type') == 'function' else set())
  return keys in ({'name', 'parameters'}, {'name', 'arguments'})


def _scan(text: str, tools: Tools) -> tuple[str, Calls]:
  del tools
  body = _END.sub('', text).strip()
  tagged = body.startswith(PYTHON_TAG)
  body = body.removeprefix(PYTHON_TAG).lstrip()
  if not body.startswith(('{', '[')):
    return text, []
  try:
    values = _read_values(body)
  except MalformedCallError as error:
    is_cut = 'other text follows' not in str(error)
    if tagged or (is_cut and _BEGUN.match(body)):
      return '', [InvalidToolCall(str(error))]
    return text, []
  if not values or not all(map(_is_call, values)):
    return text, []
  calls: Calls = []
  for value in values:
    try:
      calls.append(read_call(value, arguments=('parameters', 'arguments')))
    except MalformedCallError as error:
      calls.append(InvalidToolCall(str(error).replace('arguments', 'parameters')))
  return '', calls


def _write(calls: Sequence[ToolCall]) -> str:
  return '; '.join(
    dump_json({'name': call['name'], 'parameters': call['arguments']}) for call in calls
  )


LLAMA3 = ToolFormat(
  'Llama 3', _scan, _write, markers=(PYTHON_TAG,), bare=('{', '[{'), ends=()
)


def _scan_unknown(text: str, tools: Tools) -> tuple[str, Calls]:
  """Reads Hermes's calls, else a reply that is nothing but a readable one of Llama's.

  Nothing says that the model writes calls in one of the two ways: other JSON is an
  answer.
  """
  if HERMES.markers[0] in text:
    return HERMES.scan(text, tools)
  content, calls = _scan(text, tools)
  if any(isinstance(call, InvalidToolCall) for call in calls):
    return text, []
  if '"arguments"' in text and '"parameters"' not in text:
    return text, []
  return content, calls


UNKNOWN = ToolFormat(
  'unknown (Hermes or Llama 3)',
  _scan_unknown,
  HERMES.write,
  markers=(*HERMES.markers, PYTHON_TAG),
  bare=LLAMA3.bare,
  ends=HERMES.ends,
)
