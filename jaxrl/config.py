"""Config sections are derived from signatures, so that a default is written once."""

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from ml_collections import ConfigDict, FieldReference

from jaxrl.call_strings import (
  ComponentCall,
  ConfigError,
  defaults,
  join_calls,
  unknown_name_error,
  unwrap,
)

# A ConfigDict for the type checker: its attributes exist at run time alone.
Config = Any


class OptionalField(FieldReference):
  """A typed config value that may also be None, as its annotation `T | None` says."""


class Options(dict[str, Any]):
  """Some of a signature's options: name → default, with types and descriptions.

  Attributes:
    hints: Their annotations, by name.
    descriptions: A sentence about each, by name.
  """

  def __init__(
    self,
    values: Mapping[str, Any],
    hints: Mapping[str, Any],
    descriptions: Mapping[str, str] | None = None,
  ):
    super().__init__(values)
    self.hints = dict(hints)
    self.descriptions = dict(descriptions or {})


def pick_options(fn: Callable[..., Any], *names: str) -> Options:
  """Returns the named options of a function, for `make_section`.

  Args:
    fn: A function or class.
    *names: Keyword-only parameters with a default.

  Raises:
    ConfigError: If the function has no such option.
  """
  all_options = defaults(fn)
  for name in names:
    if name not in all_options:
      raise unknown_name_error(
        name, all_options, 'option', f'pick_options({getattr(fn, "__name__", fn)})'
      )
  chosen = {name: all_options[name] for name in names}
  return Options(chosen, option_types(fn), describe_options(fn))


def omit_options(fn: Callable[..., Any], *names: str) -> Options:
  """Returns the options of a function except those that are set elsewhere.

  Args:
    fn: A function or class.
    *names: The options to leave out.

  Raises:
    ConfigError: If the function has no such option.
  """
  pick_options(fn, *names)
  all_options = defaults(fn)
  chosen = {k: v for k, v in all_options.items() if k not in names}
  return Options(chosen, option_types(fn), describe_options(fn))


def make_section(
  *sources: Callable[..., Any] | Mapping[str, Any], **overrides: Any
) -> ConfigDict:
  """Makes a ConfigDict from the keyword-only options of functions or classes.

  Args:
    *sources: Callables, whose keyword-only parameters with defaults become keys, typed
      by their annotations; the results of `pick_options` and `omit_options`; or plain
      mappings of key → default, typed by their values. A key of several sources has the
      default and type of the last.
    **overrides: Other values for some of those keys. What a config sets, it sets here;
      everything else stays as the signature has it.

  Returns:
    The section.

  Raises:
    ConfigError: If an override names no option or has another type.
  """
  fields: dict[str, Any] = {}
  names = []
  descriptions: dict[str, str] = {}
  for source in sources:
    if isinstance(source, Mapping):
      options, hints = source, getattr(source, 'hints', {})
      descriptions |= getattr(source, 'descriptions', {})
      names.append('mapping')
    else:
      options, hints = defaults(source), option_types(source)
      descriptions |= describe_options(source)
      names.append(getattr(unwrap(source), '__name__', repr(source)))
    fields |= {key: _field(value, hints.get(key)) for key, value in options.items()}
  config = ConfigDict()
  for key, field in fields.items():
    config[key] = field
  where = f'make_section({", ".join(names)})'
  for key, value in overrides.items():
    if key not in config:
      raise unknown_name_error(key, config.keys(), 'option', where)
    try:
      config[key] = value
    except (TypeError, ValueError) as error:
      raise ConfigError(f'{where}: option {key!r}: {error}') from error
  describe_keys(config, {k: v for k, v in descriptions.items() if k in config})
  return config


def describe_keys(config: ConfigDict, descriptions: Mapping[str, str]) -> None:
  """Attaches descriptions to the keys of one section, beside those it has.

  Args:
    config: A section. They are no keys of it, and copies do not have them.
    descriptions: A sentence about each key, by name.
  """
  known = descriptions_of(config) | dict(descriptions)
  object.__setattr__(config, '_descriptions', known)


def descriptions_of(config: ConfigDict) -> dict[str, str]:
  """Returns a sentence about each key of one section, where there is one."""
  return vars(config).get('_descriptions', {})


_ENTRY = re.compile(r'^( +)\*{0,2}(\w+)(?: \([^)]*\))?: +(.*)$')
_SECTION = re.compile(r'^( *)(Args|Attributes|Keyword Args):$')


def describe_options(fn: Callable[..., Any]) -> dict[str, str]:
  """Reads what a Google-style docstring says about each parameter.

  Args:
    fn: A function or class; of a class, the docstring of its `__init__` counts too.

  Returns:
    The first sentence of each entry under `Args:` or `Attributes:`, by name, the base
    classes' first.
  """
  function = unwrap(fn)
  if not isinstance(function, type):
    return dict(_read_entries(inspect.getdoc(function) or ''))
  descriptions: dict[str, str] = {}
  for cls in reversed(function.__mro__[:-1]):
    for holder in (cls, vars(cls).get('__init__')):
      text = getattr(holder, '__doc__', None)
      descriptions |= _read_entries(inspect.cleandoc(text or ''))
  return descriptions


@functools.cache
def _read_entries(docstring: str) -> Mapping[str, str]:
  """Reads the entries below `Args:` and `Attributes:` of a docstring."""
  entries: dict[str, list[str]] = {}
  is_inside, indent, current = False, '', ''
  for line in docstring.splitlines():
    entry = _ENTRY.match(line)
    if _SECTION.match(line):
      is_inside, indent = True, ''
    elif is_inside and line and not line.startswith(' '):
      is_inside = False
    elif is_inside and entry and (not indent or entry[1] == indent):
      indent, current = entry[1], entry[2]
      entries[current] = [entry[3]]
    elif is_inside and current and line.strip():
      entries[current].append(line.strip())
  return {name: _first_sentence(' '.join(parts)) for name, parts in entries.items()}


def _first_sentence(text: str) -> str:
  """Returns a text up to its first full stop that ends a sentence, or a semicolon."""
  end = re.search(r'(?<!e\.g)(?<!i\.e)\.(?= [A-Z`\'])|\.$', text)
  text = text[: end.start()] if end else text
  return text[:1].upper() + text[1:] + '.'


def _field(value: Any, hint: Any) -> Any:
  """Converts a value to a config field: a section, or a typed reference if optional.

  Calls are stored as texts, which `launch.settings` parses.
  """
  arity = call_arity(hint)
  if isinstance(value, ComponentCall) or (arity == 'many' and value):
    return join_calls([value] if isinstance(value, ComponentCall) else value)
  if arity != 'none' and not value:
    return ''
  if isinstance(value, Mapping) and not isinstance(value, ConfigDict):
    return ConfigDict(dict(value))
  kind, optional = _kind(hint)
  if kind is float and isinstance(value, int) and not isinstance(value, bool):
    value = float(value)
  if kind and optional and (value is None or isinstance(value, kind)):
    return OptionalField(value, field_type=kind)
  return value


def _kind(hint: Any) -> tuple[type | None, bool]:
  """Splits a hint: `float | None` → (float, True); (None, …) if it is no plain type."""
  members = [hint]
  if typing.get_origin(hint) in (typing.Union, types.UnionType):
    members = list(typing.get_args(hint))
  plain = [m for m in members if m is not type(None)]
  kind = plain[0] if len(plain) == 1 else None
  kind = typing.get_origin(kind) or kind
  if kind not in (bool, int, float, str, tuple):
    kind = None
  return kind, len(plain) < len(members)


def call_arity(hint: Any) -> Literal['none', 'one', 'many']:
  """Returns whether an annotation is of one `ComponentCall`, or of a tuple of them."""
  if typing.get_origin(hint) is typing.Annotated:
    hint = typing.get_args(hint)[0]
  union = typing.get_origin(hint) in (typing.Union, types.UnionType)
  for member in typing.get_args(hint) if union else (hint,):
    if member is ComponentCall:
      return 'one'
    if typing.get_origin(member) is tuple and ComponentCall in typing.get_args(member):
      return 'many'
  return 'none'


def option_types(source: Callable[..., Any]) -> dict[str, Any]:
  """Returns annotations by parameter name; none where they cannot be evaluated.

  Args:
    source: A function or class.
  """
  function = unwrap(source)
  target = function.__init__ if isinstance(function, type) else function
  try:
    return typing.get_type_hints(target, include_extras=True)
  except (NameError, TypeError, AttributeError):
    return {}


def with_options_of(
  function: Callable[..., None], sources: Mapping[Callable[..., Any], Sequence[str]]
) -> Callable[..., None]:
  """Returns a function with further options, which other signatures define.

  It stands for a component whose options go to several classes: calls are checked
  against its signature, and its docstring describes all of its options.

  Args:
    function: A function that does nothing, with options and a docstring.
    sources: The functions or classes that define the others, with the names of the
      options that are taken from each; () for all that have a default. The first
      definition of a name counts.
  """

  @functools.wraps(function)
  def combined(**_: Any) -> None:
    pass

  parameters = dict(inspect.signature(function).parameters)
  notes = describe_options(function)
  for source, names in sources.items():
    own_parameters = inspect.signature(source).parameters
    notes = describe_options(source) | notes
    for name in names or defaults(source):
      parameter = own_parameters[name].replace(kind=inspect.Parameter.KEYWORD_ONLY)
      parameters.setdefault(name, parameter)
  signature = inspect.Signature(list(parameters.values()))
  combined.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
  text = (inspect.getdoc(function) or '').partition('\n\nArgs:')[0]
  lines = [f'  {name}: {notes[name]}' for name in parameters if name in notes]
  combined.__doc__ = '\n'.join([text, '', 'Args:', *lines]) if lines else text
  return combined
