"""Formats that write a call like a call in a program: Gemma 4, FunctionGemma, LFM2.

`LiteralReader` reads the values, which are written in Python's or Gemma's way.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Sequence
from typing import Any

from jaxrl.data.tool_formats.tool_format import (
  Calls,
  MalformedCallError,
  ToolCall,
  ToolFormat,
  Tools,
  expect,
  scan_blocks,
  skip_space,
)

_WORDS = {
  **{'true': True, 'True': True, 'false': False, 'False': False},
  **{'null': None, 'None': None, 'none': None},
}
_ATOM = re.compile(r'[^,\[\]{}()=]*')
_ESCAPE = re.compile(
  r'\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|U([0-9a-fA-F]{8})|(.))', re.DOTALL
)
_ESCAPED = {'n': '\n', 't': '\t', 'r': '\r', 'b': '\b', 'f': '\f', '0': '\0'}
_MAX_DEPTH = 200


@dataclasses.dataclass
class LiteralReader:
  """Reads values as a program writes them.

  Attributes:
    text: The text.
    at: The index of the next character.
    quotes: What stands around strings; the quotes of Python have escapes.
    depth: In how many containers the next character stands.
  """

  text: str
  at: int
  quotes: tuple[str, ...]
  depth: int = 0

  def peek(self) -> str:
    """Returns the next character that is not a space, or nothing at the end."""
    self.at = skip_space(self.text, self.at)
    return self.text[self.at : self.at + 1]

  def take(self, mark: str) -> bool:
    """Steps over `mark` if it comes next."""
    self.peek()
    if found := self.text.startswith(mark, self.at):
      self.at += len(mark)
    return found

  def need(self, mark: str) -> None:
    """Steps over `mark`, which must come next."""
    if not self.take(mark):
      there = self.text[self.at : self.at + 20]
      raise MalformedCallError(f'{mark!r} is missing before {there!r}')

  def value(self) -> Any:
    """Reads a value."""
    if self.depth > _MAX_DEPTH:
      raise MalformedCallError('its values are nested too deeply')
    first = self.peek()
    if first == '{':
      return self.pairs('{', '}', ':')
    if first in ('[', '('):
      return self.items(first, ']' if first == '[' else ')')
    for quote in self.quotes:
      if self.text.startswith(quote, self.at):
        return self.string(quote)
    return self.atom()

  def items(self, opening: str, closing: str) -> list[Any]:
    """Reads a list."""
    self.need(opening)
    self.depth += 1
    values = []
    while not self.take(closing):
      values.append(self.value())
      if not self.take(','):
        self.need(closing)
        break
    self.depth -= 1
    return values

  def pairs(self, opening: str, closing: str, sign: str) -> dict[str, Any]:
    """Reads an object, or the arguments of a call."""
    self.need(opening)
    self.depth += 1
    values = {}
    while not self.take(closing):
      key = self.key(sign)
      values[key] = self.value()
      if not self.take(','):
        self.need(closing)
        break
    self.depth -= 1
    return values

  def key(self, sign: str) -> str:
    """Reads a key, with quotes or without, and the sign after it."""
    self.peek()
    for quote in self.quotes:
      if self.text.startswith(quote, self.at):
        key = self.string(quote, sign)
        self.need(sign)
        return key
    end = self.text.find(sign, self.at)
    key = self.text[self.at : end].strip() if end >= 0 else ''
    if not key or '\n' in key:
      there = self.text[self.at : self.at + 20]
      raise MalformedCallError(f'a name of an argument is missing before {there!r}')
    self.at = end + len(sign)
    return key

  def string(self, quote: str, sign: str = '') -> str:
    """Reads a string; Python's quotes count as its end only where one can be."""
    start = self.at + len(quote)
    if len(quote) > 1:  # a marker of its own, without escapes
      end = self.text.find(quote, start)
      if end < 0:
        raise MalformedCallError(f'a string does not end with {quote}')
      self.at = end + len(quote)
      return self.text[start:end]
    after = sign or r',)\]}:'
    pattern = rf'((?:\\.|[^\\])*?){quote}(?=\s*(?:[{after}]|$))'
    match = re.compile(pattern, re.DOTALL).match(self.text, start)
    if match is None:
      raise MalformedCallError(f'a string does not end with {quote}')
    self.at = match.end()
    return _ESCAPE.sub(_unescape, match[1])

  def atom(self) -> Any:
    """Reads a number or a word."""
    match = _ATOM.match(self.text, self.at)
    word = match[0].strip() if match else ''
    if not word:
      there = self.text[self.at : self.at + 20]
      raise MalformedCallError(f'a value is missing before {there!r}')
    self.at += len(match[0]) if match else 0
    if word in _WORDS:
      return _WORDS[word]
    try:
      return json.loads(word, parse_constant=lambda name: name)
    except (ValueError, RecursionError):
      pass
    if self.quotes[0] in ("'", '"'):
      raise MalformedCallError(f'{word[:40]!r} is no value')
    return word  # Gemma leaves out quotes now and then


def _unescape(match: re.Match[str]) -> str:
  code = match[1] or match[2] or match[3]
  if code:
    try:
      return chr(int(code, 16))
    except (ValueError, OverflowError):
      return match[0]
  if match[4] in _ESCAPED:
    return _ESCAPED[match[4]]
  return match[4] if match[4] in '\\\'"' else match[0]


def _write_value(value: object, quote: str) -> str:
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


def _write_python(value: object) -> str:
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
