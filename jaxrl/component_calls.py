"""Component calls name a component and its options, as texts such as `name(option=1)`.

Configs write the texts, which are parsed once; all else receives `ComponentCall`s.
"""

import ast
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from jaxrl.options import ConfigError, Keywords

_CALL = re.compile(r'\s*([\w.:/\-~]+)\s*(\(.*\))?\s*', re.DOTALL)


@dataclasses.dataclass(frozen=True, repr=False)
class ComponentCall:
  """Names a component and the options it is to be called with.

  `ComponentCall('reward_std', {'threshold': 0.1})` is what a config writes as
  `reward_std(threshold=0.1)`; `launch.settings` reads such texts, and everything below
  it receives these objects. They are hashable, and equal if name and options are.

  Attributes:
    name: A built-in component's name, or `package.module:name` or `path/file.py:name`.
    options: The options by name.
    text: How messages show the call; as Python would write it, unless given.

  Raises:
    ConfigError: If the name contains options.
  """

  name: str
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  text: str = dataclasses.field(default='', compare=False)

  def __post_init__(self) -> None:
    if '(' in self.name:
      raise ConfigError(
        f'{self.name!r} is a call string, which only configs contain: in Python write '
        "ComponentCall('name', {'option': value})"
      )
    if not self.text:
      listing = ', '.join(f'{key}={value!r}' for key, value in self.options.items())
      text = f'{self.name}({listing})' if listing else self.name
      object.__setattr__(self, 'text', text)

  def __hash__(self) -> int:
    return hash((self.name, *sorted(self.options)))  # options need not be hashable

  def __str__(self) -> str:
    return self.text

  __repr__ = __str__

  @classmethod
  def from_text(cls, text: str) -> 'ComponentCall':
    """Returns the call that a text describes, as `parse_call` reads it."""
    return parse_call(text)

  @classmethod
  def many_from_text(cls, text: str) -> 'tuple[ComponentCall, ...]':
    """Returns the calls that a text describes, as `parse_calls` reads it."""
    return parse_calls(text)

  def with_options(self, **options: object) -> 'ComponentCall':
    """Returns the call with some options added or replaced.

    Args:
      **options: The options.
    """
    return ComponentCall(self.name, {**self.options, **options})


def parse_call(text: str) -> ComponentCall:
  """Reads `name` or `name(a=1, b='x')`: keyword arguments, Python literals only.

  Args:
    text: The call string.

  Returns:
    The call, whose text is the call string.

  Raises:
    ConfigError: If it cannot be read.
  """
  match = _CALL.fullmatch(text)
  if match is None:
    raise ConfigError(f'cannot read {text!r}: write name or name(option=value, …)')
  name, arguments = match.group(1), match.group(2)
  if arguments is None:
    return ComponentCall(name, {}, text)
  try:
    call = ast.parse(f'f{arguments}', mode='eval').body
  except SyntaxError as error:
    raise ConfigError(f'cannot read {text!r}: {error.msg}') from error
  if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
    raise ConfigError(f'cannot read {text!r}: write name(option=value, …)')
  if call.args or any(keyword.arg is None for keyword in call.keywords):
    raise ConfigError(f'{text!r}: options go by name, as in {name}(option=value)')
  options: Keywords = {}
  for keyword in call.keywords:
    if keyword.arg in options:
      raise ConfigError(f'cannot read {text!r}: {keyword.arg!r} is given twice')
    try:
      options[str(keyword.arg)] = ast.literal_eval(keyword.value)
    except ValueError as error:
      raise ConfigError(
        f'{text!r}: option {keyword.arg!r} must be a literal such as 1, .5, '
        "'text', True or None"
      ) from error
  return ComponentCall(name, options, text)


def parse_calls(text: str) -> tuple[ComponentCall, ...]:
  """Reads `a(x=1) + b`: call strings joined by +; '' contains none.

  Args:
    text: The text.

  Returns:
    The calls, as `parse_call` returns them.

  Raises:
    ConfigError: If one cannot be read.
  """
  return tuple(parse_call(term) for term in split_terms(text))


def split_terms(text: str, separator: str = '+') -> list[str]:
  """Splits a text at separators outside brackets and quotes.

  Args:
    text: The text; an empty one has no terms.
    separator: The separator.

  Returns:
    The terms.

  Raises:
    ConfigError: If a term is empty.
  """
  if not text.strip():
    return []
  terms, start, depth, quote, i = [], 0, 0, '', 0
  while i < len(text):
    mark = text[i]
    if quote:
      i += mark == '\\'
      quote = '' if mark == quote else quote
    elif depth and mark in '\'"':
      quote = mark
    elif mark in '([{':
      depth += 1
    elif mark in ')]}':
      depth -= 1
    elif depth == 0 and text.startswith(separator, i):
      terms.append(text[start:i].strip())
      i = start = i + len(separator)
      continue
    i += 1
  terms.append(text[start:].strip())
  if '' in terms:
    raise ConfigError(
      f'cannot read {text!r}: there is nothing on one side of a {separator!r}'
    )
  return terms
