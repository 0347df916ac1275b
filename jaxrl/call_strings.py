"""Call strings such as `name(a=1)`: parsing, and checking options against signatures.

A default is written once, as a keyword-only parameter. Configs, call strings and
command lines are all checked against that one place.
"""

import ast
import difflib
import functools
import importlib
import importlib.util
import inspect
import pathlib
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_CALL = re.compile(r'\s*([\w.:/\-~]+)\s*(\(.*\))?\s*', re.DOTALL)


class ConfigError(ValueError):
  """A setting is wrong; the message says which, where, and what would be right."""


def unwrap(fn: Callable[..., Any]) -> Callable[..., Any]:
  """Returns the plain function under any layers of `functools.partial`.

  Args:
    fn: A callable.
  """
  while isinstance(fn, functools.partial):
    fn = fn.func
  return fn


def _options(fn: Callable[..., Any]) -> dict[str, inspect.Parameter]:
  """The keyword-only parameters of `fn` by name, private ones left out.

  Private ones are others' business: ray writes one into the signature of the methods
  of every class that it has made an actor of.
  """
  return {
    name: parameter
    for name, parameter in inspect.signature(fn).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and not name.startswith('_')
  }


def defaults(fn: Callable[..., Any]) -> dict[str, Any]:
  """Returns the keyword-only parameters that have a default, in order.

  Args:
    fn: A function or class.

  Returns:
    Name → default.
  """
  return {
    name: parameter.default
    for name, parameter in _options(fn).items()
    if parameter.default is not parameter.empty
  }


def closest_match(name: str, names: Iterable[str]) -> str | None:
  """Returns the most similar of some names, or None when nothing is close.

  Args:
    name: The name to match.
    names: The candidates.
  """
  matches = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
  return matches[0] if matches else None


def unknown_name_error(
  name: str, names: Iterable[str], what: str, where: str
) -> ConfigError:
  """Returns the error for a name that does not exist, with the closest match.

  Args:
    name: The unknown name.
    names: Those that exist.
    what: What they name, such as "option".
    where: What the message begins with.
  """
  names = sorted(names)
  guess = closest_match(name, names)
  hint = f" Did you mean '{guess}'?" if guess else ''
  listing = ', '.join(names) if names else 'none'
  return ConfigError(f"{where}: no {what} '{name}'.{hint} There are: {listing}.")


def check_options(
  fn: Callable[..., Any], options: Mapping[str, Any], where: str
) -> None:
  """Checks that a function takes some options.

  Names are checked against the keyword-only parameters; values against the type of the
  default, `Literal` annotations, and `| None` where the value is None.

  Args:
    fn: A function or class.
    options: Values by name.
    where: What error messages begin with.

  Raises:
    ConfigError: If a name is unknown or a value has another type.
  """
  parameters = _options(fn)
  for name, value in options.items():
    if name not in parameters:
      raise unknown_name_error(name, parameters, 'option', where)
    _check_value(parameters[name], value, f'{where}: option {name!r}')


def _check_value(parameter: inspect.Parameter, value: Any, where: str) -> None:
  annotation, default = parameter.annotation, parameter.default
  if value is None:
    if default is None or 'None' in str(annotation):
      return
    raise ConfigError(f'{where} cannot be None; its default is {default!r}.')
  choices = _choices(annotation)
  if choices:
    if value not in choices:
      listing = ', '.join(repr(c) for c in choices)
      raise ConfigError(f'{where} is {value!r}; it must be one of {listing}.')
    return
  wanted = _wanted_types(annotation, default)
  if wanted and not any(_fits(value, kind) for kind in wanted):
    kinds = ' or '.join(kind.__name__ for kind in wanted)
    raise ConfigError(
      f'{where} is {value!r}, a {type(value).__name__}; it must be a {kinds}.'
    )


def _choices(annotation: Any) -> tuple[Any, ...]:
  """Values of a `Literal`, also inside a union; empty when there is none."""
  if typing.get_origin(annotation) is typing.Literal:
    return typing.get_args(annotation)
  nested_choices = (
    _choices(a) for a in typing.get_args(annotation) if a is not annotation
  )
  return next((choices for choices in nested_choices if choices), ())


def _wanted_types(annotation: Any, default: Any) -> list[type]:
  union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
  members = typing.get_args(annotation) if union else (annotation,)
  plain_types = [kind for kind in members if kind in (bool, int, float, str)]
  if not plain_types and isinstance(default, bool | int | float | str):
    plain_types = [type(default)]
  return plain_types


def wanted_type(fn: Callable[..., Any], option: str) -> type | None:
  """Returns the type that an option must have.

  Args:
    fn: A function or class.
    option: The name of a parameter.

  Returns:
    bool, int, float or str, the first of several; None if the signature does not say.
  """
  parameter = inspect.signature(fn).parameters.get(option)
  if parameter is None:
    return None
  wanted = _wanted_types(parameter.annotation, parameter.default)
  return wanted[0] if wanted else None


def _fits(value: Any, wanted: type) -> bool:
  if wanted is float:
    return isinstance(value, int | float) and not isinstance(value, bool)
  if wanted is int:
    return isinstance(value, int) and not isinstance(value, bool)
  return isinstance(value, wanted)


def parse_call(text: str) -> tuple[str, dict[str, Any]]:
  """Reads `name` or `name(a=1, b='x')`: keyword arguments, Python literals only.

  Args:
    text: The call string.

  Returns:
    The name and the options.

  Raises:
    ConfigError: If it cannot be read.
  """
  match = _CALL.fullmatch(text)
  if match is None:
    raise ConfigError(f'cannot read {text!r}: write name or name(option=value, …)')
  name, arguments = match.group(1), match.group(2)
  if arguments is None:
    return name, {}
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
  return name, options


def call(
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
    ConfigError: If a name or an option does not exist.
  """
  where = f'--config.{key}={text}'
  name, options = parse_call(text)
  if name not in known:
    raise unknown_name_error(name, known, what, where)
  check_options(known[name], options, where)
  return known[name](**options)


def split(text: str, separator: str = '+') -> list[str]:
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
    raise ConfigError(f'cannot read {text!r}: nothing stands beside a {separator!r}')
  return terms


def parse_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
  """Reads `a(x=1) + b`: call strings joined by +; '' contains none.

  Args:
    text: The text.

  Returns:
    A name and options for each, as `parse_call` returns them.
  """
  return [parse_call(term) for term in split(text)]


def resolve(target: str) -> Any:
  """Imports an attribute.

  An error raised while the module is imported is not caught: its traceback is the
  answer.

  Args:
    target: `'pkg.mod:attr'` or `'path/file.py:attr'`.

  Returns:
    The attribute.

  Raises:
    ConfigError: If there is no such module, file or attribute.
  """
  location, _, attribute = target.rpartition(':')
  if not location or not attribute:
    raise ConfigError(
      f'cannot resolve {target!r}: write package.module:name or path/file.py:name'
    )
  module = _load_file(location) if location.endswith('.py') else _load(location)
  if not hasattr(module, attribute):
    names = [name for name in vars(module) if not name.startswith('_')]
    raise unknown_name_error(attribute, names, 'attribute', location)
  return getattr(module, attribute)


def _load(name: str) -> Any:
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as error:
    # Only the named module's own absence is the setting's fault.
    if error.name is not None and (name + '.').startswith(error.name + '.'):
      raise ConfigError(f'there is no module {name!r} to import') from error
    raise


def functions(path: str) -> dict[str, Callable[..., Any]]:
  """Returns the public functions that a Python file itself defines, in order.

  Args:
    path: The file.

  Returns:
    Functions by name.
  """
  module = _load_file(path)
  return {
    name: value
    for name, value in vars(module).items()
    if inspect.isfunction(value)
    and value.__module__ == module.__name__
    and not name.startswith('_')
  }


@functools.cache
def _load_file(path: str) -> Any:
  file = pathlib.Path(path).expanduser()
  if not file.is_file():
    raise ConfigError(f'there is no file {path!r}')
  spec = importlib.util.spec_from_file_location(f'jaxrl_user_{file.stem}', file)
  if spec is None or spec.loader is None:
    raise ConfigError(f'{path!r} is not a Python file')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module
