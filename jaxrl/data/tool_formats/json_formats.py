"""Formats that write a call's arguments as JSON, between markers of the family.

Llama 3 has no markers: its reply is a JSON object, or several, and nothing else.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any

from jaxrl.data.tool_formats.tool_format import (
  Calls,
  InvalidToolCall,
  MalformedCallError,
  ToolCall,
  ToolFormat,
  Tools,
  dump_json,
  expect,
  read_arguments,
  read_call,
  read_json,
  scan_blocks,
  skip_space,
)


def _json_objects(
  name: str, open_tag: str, close_tag: str, arguments: str = 'arguments'
) -> ToolFormat:
  """Makes the format of `<open>{"name": …, "arguments": {…}}<close>`, any number."""

  def read(text: str, match: re.Match[str], tools: Tools) -> tuple[Calls, int]:
    del tools
    value, at = read_json(text, match.end())
    at = expect(text, at, close_tag)
    try:
      return [read_call(value, arguments=(arguments,))], at
    except MalformedCallError as error:
      return [InvalidToolCall(str(error))], at

  def write(calls: Sequence[ToolCall]) -> str:
    texts = (
      dump_json({'name': call['name'], arguments: call['arguments']}) for call in calls
    )
    return '\n'.join(f'{open_tag}\n{text}\n{close_tag}' for text in texts)

  scan = functools.partial(
    scan_blocks, opening=re.compile(re.escape(open_tag)), read=read, ends=(close_tag,)
  )
  return ToolFormat(name, scan, write, markers=(open_tag,), ends=(close_tag,))


def _json_list(
  name: str,
  open_tag: str,
  close_tag: str = '',
  *,
  keys: tuple[str, str] = ('name', 'arguments'),
) -> ToolFormat:
  """Makes the format of `<open>[{"name": …, "arguments": {…}}, …]<close>`."""

  def read(text: str, match: re.Match[str], tools: Tools) -> tuple[Calls, int]:
    del tools
    values, at = read_json(text, match.end())
    if close_tag:
      at = expect(text, at, close_tag)
    calls = [_read_item(value, keys) for value in _as_list(values)]
    return calls or [InvalidToolCall('its list has no call')], at

  def write(calls: Sequence[ToolCall]) -> str:
    items = [
      {keys[0]: call['name'], keys[1]: call['arguments']}
      if keys[0] == 'name'
      else {'tool_call_id': str(i), keys[0]: call['name'], keys[1]: call['arguments']}
      for i, call in enumerate(calls)
    ]
    return open_tag + dump_json(items) + close_tag

  ends = (close_tag,) if close_tag else ()
  scan = functools.partial(
    scan_blocks, opening=re.compile(re.escape(open_tag)), read=read, ends=ends
  )
  return ToolFormat(name, scan, write, markers=(open_tag,), ends=ends)


def _as_list(value) -> list:
  return value if isinstance(value, list) else [value]


def _read_item(value, keys: tuple[str, str]) -> ToolCall | InvalidToolCall:
  try:
    return read_call(value, (keys[0],), (keys[1],))
  except MalformedCallError as error:
    return InvalidToolCall(str(error))


def _named_json(
  name: str,
  opening: str,
  template: str,
  *,
  end: str,
  fence: tuple[str, str] = ('', ''),
  wrappers: tuple[str, str],
  separator: str = '',
) -> ToolFormat:
  """Makes a format with the tool's name between markers and its arguments as JSON.

  Args:
    name: The format's name.
    opening: A pattern of everything before the arguments, with a group `name`.
    template: How that is written, with `{name}` and `{number}`.
    end: What ends a call.
    fence: What stands around the JSON.
    wrappers: What stands around all calls.
    separator: What stands between calls.
  """

  def read(text: str, match: re.Match[str], tools: Tools) -> tuple[Calls, int]:
    del tools
    if match['name'] is None:
      raise MalformedCallError('it does not begin with the name of a tool')
    at = skip_space(text, match.end())
    if fence[0] and text.startswith(fence[0].strip(), at):
      at += len(fence[0].strip())
    start = skip_space(text, at)
    if text.startswith((end, fence[1].strip() or end), start):
      value, at = {}, start  # no arguments at all
    else:
      value, at = read_json(text, start)
    at = skip_space(text, at)
    if fence[1] and text.startswith(fence[1].strip(), at):
      at += len(fence[1].strip())
    at = expect(text, at, end)
    try:
      return [{'name': match['name'].strip(), 'arguments': read_arguments(value)}], at
    except MalformedCallError as error:
      return [InvalidToolCall(str(error))], at

  def write(calls: Sequence[ToolCall]) -> str:
    texts = [
      template.format(name=call['name'], number=i)
      + fence[0]
      + dump_json(call['arguments'])
      + fence[1]
      + end
      for i, call in enumerate(calls)
    ]
    return wrappers[0] + separator.join(texts) + wrappers[1]

  begin = template.partition('{')[0]
  if 'function' in begin:  # of which the marker is only the first part
    begin = begin.partition('function')[0]
  pattern = re.compile(f'{opening}|{re.escape(begin)}')
  scan = functools.partial(
    scan_blocks, opening=pattern, read=read, ends=(end,), wrappers=wrappers
  )
  return ToolFormat(
    name, scan, write, markers=(wrappers[0], begin), ends=(end, wrappers[1])
  )


HERMES = _json_objects('Hermes', '<tool_call>', '</tool_call>')
PHI4 = _json_list('Phi-4-mini', '<|tool_call|>', '<|/tool_call|>')
GRANITE = _json_list('Granite', '<|tool_call|>')
NEMOTRON = _json_list('Nemotron', '<TOOLCALL>', '</TOOLCALL>')
COHERE = _json_list(
  'Cohere', '<|START_ACTION|>', '<|END_ACTION|>', keys=('tool_name', 'parameters')
)

_DEEPSEEK_WRAPPERS = '<｜tool▁calls▁begin｜>', '<｜tool▁calls▁end｜>'
_DEEPSEEK_NAME = r'(?P<name>[^<\n]+?)'
DEEPSEEK_V3 = _named_json(
  'DeepSeek V3',
  rf'<｜tool▁call▁begin｜>\s*function\s*<｜tool▁sep｜>{_DEEPSEEK_NAME}\s*(?=\n|```|\{{)',
  '<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n',
  end='<｜tool▁call▁end｜>',
  fence=('```json\n', '\n```'),
  wrappers=_DEEPSEEK_WRAPPERS,
  separator='\n',
)
DEEPSEEK_V31 = _named_json(
  'DeepSeek V3.1',
  rf'<｜tool▁call▁begin｜>{_DEEPSEEK_NAME}<｜tool▁sep｜>',
  '<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>',
  end='<｜tool▁call▁end｜>',
  wrappers=_DEEPSEEK_WRAPPERS,
)
KIMI_K2 = _named_json(
  'Kimi K2',
  r'<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[^<\n]+?)(?::\d+)?\s*'
  r'<\|tool_call_argument_begin\|>',
  '<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>',
  end='<|tool_call_end|>',
  wrappers=('<|tool_calls_section_begin|>', '<|tool_calls_section_end|>'),
)

_MISTRAL = '[TOOL_CALLS]'
_MISTRAL_NAME = re.compile(
  r'\s*(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\][^\[\]{}]*)?(?:\[ARGS\])?\s*(?=\{)'
)


def _read_mistral(text: str, match: re.Match[str], tools: Tools) -> tuple[Calls, int]:
  """Reads either `[{"name": …}, …]` or `name[ARGS]{…}`."""
  del tools
  header = _MISTRAL_NAME.match(text, match.end())
  if header is None:
    values, at = read_json(text, match.end())
    calls = [_read_item(value, ('name', 'arguments')) for value in _as_list(values)]
    return calls or [InvalidToolCall('its list has no call')], at
  value, at = read_json(text, header.end())
  return [{'name': header['name'], 'arguments': read_arguments(value)}], at


_scan_mistral = functools.partial(
  scan_blocks, opening=re.compile(re.escape(_MISTRAL)), read=_read_mistral
)


def _write_mistral_list(calls: Sequence[ToolCall]) -> str:
  items = [{'name': call['name'], 'arguments': call['arguments']} for call in calls]
  return f'{_MISTRAL}{dump_json(items)}'


def _write_mistral_names(calls: Sequence[ToolCall]) -> str:
  return ''.join(
    f'{_MISTRAL}{call["name"]}[ARGS]{dump_json(call["arguments"])}' for call in calls
  )


MISTRAL_LIST = ToolFormat(
  'Mistral (list)', _scan_mistral, _write_mistral_list, markers=(_MISTRAL,)
)
MISTRAL = ToolFormat('Mistral', _scan_mistral, _write_mistral_names, (_MISTRAL,))


PYTHON_TAG = '<|python_tag|>'
_LLAMA_END = re.compile(r'\s*(?:<\|eom_id\|>|<\|eot_id\|>)\s*$')
_LLAMA_BEGUN = re.compile(r'\[?\s*\{\s*"(?:name"\s*:|type"\s*:\s*"function)')


def _read_llama_values(text: str) -> list[Any]:
  """Reads JSON objects with `;` between them, or one list of them."""
  value, at = read_json(text, 0)
  values = value if isinstance(value, list) else [value]
  while (at := skip_space(text, at)) < len(text):
    if text[at] != ';' or isinstance(value, list):
      raise MalformedCallError('other text follows it')
    another, at = read_json(text, at + 1)
    values.append(another)
  return values


def _is_llama_call(value: object) -> bool:
  if not isinstance(value, dict) or not isinstance(value.get('name'), str):
    return False
  keys = value.keys() - ({'type'} if value.get('type') == 'function' else set())
  return keys in ({'name', 'parameters'}, {'name', 'arguments'})


def _scan_llama(text: str, tools: Tools) -> tuple[str, Calls]:
  del tools
  body = _LLAMA_END.sub('', text).strip()
  tagged = body.startswith(PYTHON_TAG)
  body = body.removeprefix(PYTHON_TAG).lstrip()
  if not body.startswith(('{', '[')):
    return text, []
  try:
    values = _read_llama_values(body)
  except MalformedCallError as error:
    is_cut = 'other text follows' not in str(error)
    if tagged or (is_cut and _LLAMA_BEGUN.match(body)):
      return '', [InvalidToolCall(str(error))]
    return text, []
  if not values or not all(map(_is_llama_call, values)):
    return text, []
  calls: Calls = []
  for value in values:
    try:
      calls.append(read_call(value, arguments=('parameters', 'arguments')))
    except MalformedCallError as error:
      calls.append(InvalidToolCall(str(error).replace('arguments', 'parameters')))
  return '', calls


def _write_llama(calls: Sequence[ToolCall]) -> str:
  return '; '.join(
    dump_json({'name': call['name'], 'parameters': call['arguments']}) for call in calls
  )


LLAMA3 = ToolFormat(
  'Llama 3', _scan_llama, _write_llama, markers=(PYTHON_TAG,), bare=('{', '[{'), ends=()
)


def _scan_unknown(text: str, tools: Tools) -> tuple[str, Calls]:
  """Reads Hermes's calls, else a reply that is nothing but a readable one of Llama's.

  Nothing says that the model writes calls in one of the two ways: other JSON is an
  answer.
  """
  if HERMES.markers[0] in text:
    return HERMES.scan(text, tools)
  content, calls = _scan_llama(text, tools)
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
