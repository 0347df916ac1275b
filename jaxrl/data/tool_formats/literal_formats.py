"""Formats that write a call like a call in a program: Gemma 4, FunctionGemma, LFM2."""

import functools
import json
import re
from collections.abc import Sequence
from typing import Any

from jaxrl.data.tool_formats.literal_reader import LiteralReader
from jaxrl.data.tool_formats.tool_format import (
  Calls,
  MalformedCallError,
  ToolCall,
  ToolFormat,
  Tools,
  expect,
  scan_blocks,
)


def _write_value(value: Any, quote: str) -> str:
  if isinstance(value, str):
    return f'{quote}{value}{quote}'
  if isinstance(value, dict):
    return _write_pairs(value, quote)
  if isinstance(value, list | tuple):
    return f'[{",".join(_write_value(one, quote) for one in value)}]'
  return json.dumps(value)


def _write_pairs(values: dict[str, Any], quote: str) -> str:
  pairs = []
  for key, value in values.items():
    name = key if re.fullmatch(r'[\w.$-]+', key) else f'{quote}{key}{quote}'
    pairs.append(f'{name}:{_write_value(value, quote)}')
  return '{' + ','.join(pairs) + '}'


def _braced(name: str, open_tag: str, close_tag: str, quote: str) -> ToolFormat:
  """Makes the format of `<open>call:name{key:value,…}<close>`."""

  def read(text: str, match: re.Match[str], tools: Tools) -> tuple[Calls, int]:
    del tools
    if match['name'] is None:
      raise MalformedCallError('it does not begin with call: and the name of a tool')
    reader = LiteralReader(text, match.end(), (quote,))
    arguments = reader.pairs('{', '}', ':')
    at = expect(text, reader.at, close_tag)
    return [{'name': match['name'], 'arguments': arguments}], at

  def write(calls: Sequence[ToolCall]) -> str:
    return ''.join(
      f'{open_tag}call:{call["name"]}{_write_pairs(call["arguments"], quote)}'
      f'{close_tag}'
      for call in calls
    )

  tag = re.escape(open_tag)
  opening = re.compile(rf'{tag}\s*call:\s*(?P<name>[^\s{{]+)\s*(?={{)|{tag}')
  scan = functools.partial(scan_blocks, opening=opening, read=read, ends=(close_tag,))
  return ToolFormat(name, scan, write, (open_tag,), ends=(close_tag,))


GEMMA4 = _braced('Gemma 4', '<|tool_call>', '<tool_call|>', '<|"|>')
FUNCTION_GEMMA = _braced(
  'FunctionGemma', '<start_function_call>', '<end_function_call>', '<escape>'
)

_LFM_OPEN, _LFM_CLOSE = '<|tool_call_start|>', '<|tool_call_end|>'
_PYTHON_NAME = re.compile(r'\s*([^\s\[\]{}(),=]+)\s*(?=\()')


def _read_lfm2(text: str, match: re.Match[str], tools: Tools) -> tuple[Calls, int]:
  del tools
  reader = LiteralReader(text, match.end(), ("'", '"'))
  bracketed = reader.take('[')
  calls: Calls = []
  while not (bracketed and reader.take(']')):
    name = _PYTHON_NAME.match(text, reader.at)
    if name is None:
      raise MalformedCallError('it must be a list of calls such as [name(key=1)]')
    reader.at = name.end()
    calls.append({'name': name[1], 'arguments': reader.pairs('(', ')', '=')})
    if not reader.take(','):
      if bracketed:
        reader.need(']')
      break
  if not calls:
    raise MalformedCallError('its list has no call')
  return calls, expect(text, reader.at, _LFM_CLOSE)


def _write_python(value: Any) -> str:
  if isinstance(value, str):
    escaped = json.dumps(value, ensure_ascii=False)[1:-1].replace('\\"', '"')
    return "'" + escaped.replace("'", "\\'") + "'"
  if isinstance(value, dict):
    pairs = (
      f'{_write_python(key)}: {_write_python(one)}' for key, one in value.items()
    )
    return '{' + ', '.join(pairs) + '}'
  if isinstance(value, list | tuple):
    return '[' + ', '.join(map(_write_python, value)) + ']'
  return str(value) if value is None or isinstance(value, bool) else json.dumps(value)


def _write_lfm2(calls: Sequence[ToolCall]) -> str:
  texts = []
  for call in calls:
    pairs = (f'{key}={_write_python(one)}' for key, one in call['arguments'].items())
    texts.append(f'{call["name"]}({", ".join(pairs)})')
  return f'{_LFM_OPEN}[{", ".join(texts)}]{_LFM_CLOSE}'


LFM2 = ToolFormat(
  'LFM2',
  functools.partial(
    scan_blocks,
    opening=re.compile(re.escape(_LFM_OPEN)),
    read=_read_lfm2,
    ends=(_LFM_CLOSE,),
  ),
  _write_lfm2,
  (_LFM_OPEN,),
  ends=(_LFM_CLOSE,),
)
