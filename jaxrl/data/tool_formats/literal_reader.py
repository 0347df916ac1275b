"""Values are read here as a program writes them, in Python's or Gemma's way."""

import dataclasses
import json
import re
from typing import Any

from jaxrl.data.tool_formats.tool_format import MalformedCallError, skip_space

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
    """Returns the next character that is no space, or nothing at the end."""
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
