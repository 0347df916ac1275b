"""Parse call strings such as `name(a=1)`, the syntax in which configs name components.

Only this package reads and writes them. Everything below receives `ComponentCall`s, or
what the components are called to make.
"""

import ast
import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxrl.call_strings import ComponentCall, ConfigError, build_component
from jaxrl.data.row_sources import GENERATE_PREFIX, RowSources

_CALL = re.compile(r'\s*([\w.:/\-~]+)\s*(\(.*\))?\s*', re.DOTALL)


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
  options: dict[str, Any] = {}
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


@contextlib.contextmanager
def naming_key(key: str, text: Any) -> Iterator[None]:
  """Makes the errors of a block begin with a config key and its value.

  Args:
    key: The dotted key.
    text: Its value.

  Raises:
    ConfigError: An error of the block, with the key.
  """
  try:
    yield
  except ConfigError as error:
    raise ConfigError(f'--config.{key}={text}: {error}') from error


def parse_setting(key: str, text: str, parse: Callable[[str], Any]) -> Any:
  """Parses the text of a config key.

  Args:
    key: The dotted key.
    text: Its value.
    parse: `parse_call`, `parse_calls` or `parse_row_sources`.

  Returns:
    What `parse` returns.

  Raises:
    ConfigError: If the text cannot be read; the message begins with the key.
  """
  with naming_key(key, text):
    return parse(text)


def parse_component(
  text: str, known: Mapping[str, Callable[..., Any]], what: str, key: str
) -> Any:
  """Calls the function that a call string names, with its options.

  Args:
    text: The call string.
    known: Functions by name.
    what: What these are called in errors.
    key: The config key of the string.

  Returns:
    What the function returns.

  Raises:
    ConfigError: If the text cannot be read, or a name or an option does not exist.
  """
  return build_component(parse_setting(key, text, parse_call), known, what, key)


def parse_row_sources(text: str) -> RowSources:
  """Parses where rows come from: one or more sources, joined by ` + `.

  Args:
    text: Paths, and call strings of generators, `generate:name(option=value)`.

  Returns:
    A path, the call of a generator, or a tuple of both. A call's text is the term.

  Raises:
    ConfigError: If it cannot be read.
  """
  sources = tuple(map(_parse_row_source, split_terms(text, ' + ')))
  return sources if len(sources) > 1 else _parse_row_source(text)


def _parse_row_source(term: str) -> str | ComponentCall:
  if not term.startswith(GENERATE_PREFIX):
    return term
  call = parse_call(term.removeprefix(GENERATE_PREFIX))
  return ComponentCall(call.name, call.options, term)


def with_options(text: str, **options: Any) -> str:
  """Returns a call string with some of its options set.

  Args:
    text: A call string such as `first_fit(tokens=8192)`.
    **options: Options to add or replace.

  Raises:
    ConfigError: If the call string cannot be read.
  """
  return str(parse_call(text).with_options(**options))
