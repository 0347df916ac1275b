"""Configs hold options as ConfigDicts, which files and command lines change.

`to_config` and `from_config` turn the options of a part into a section and back. The
sections of algorithms and environments are made from the signatures that take them.
"""

import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ml_collections import ConfigDict, FieldReference

from jaxrl.component_calls import ComponentCall
from jaxrl.component_table import join_calls
from jaxrl.options import (
  ConfigError,
  Configurable,
  Definition,
  Kind,
  OptionError,
  Options,
  OptionValues,
  defaults,
  descriptions,
  field_kinds,
  unknown_name_error,
  unwrap,
  value_kind,
)

# A ConfigDict for the type checker: its attributes exist at run time alone.
Config = Any


class OptionalField(FieldReference):
  """A typed config value that may also be None, as its annotation `T | None` says."""


def to_config(options: Options) -> ConfigDict:
  """Returns options as a ConfigDict, with calls as texts.

  Values that may be None keep their type, as `OptionalField`.

  Args:
    options: The options; those that they hold become sections.
  """
  config = ConfigDict()
  for name, kind in field_kinds(type(options)).items():
    value = getattr(options, name)
    if kind.type is None and isinstance(value, tuple):  # several sources of rows
      value = join_calls(value)
    config[name] = _config_value(kind, value)
  describe_keys(config, descriptions(type(options)))
  return config


def _config_value(kind: Kind, value: Any) -> Any:
  """Converts a value to that of a config: a section, a text, or a typed reference."""
  if isinstance(value, Options):
    return to_config(value)
  if isinstance(value, Mapping) and not isinstance(value, ConfigDict):
    return ConfigDict({name: _config_value(Kind(None), x) for name, x in value.items()})
  if kind.is_many:
    return join_calls(value)
  if isinstance(value, ComponentCall) or hasattr(kind.type, 'from_text'):
    return '' if value is None else str(value)
  if kind.type is float and type(value) is int:
    value = float(value)
  is_typed = value is None or (kind.type is not None and isinstance(value, kind.type))
  if kind.is_optional and kind.type is not None and is_typed:
    return OptionalField(value, field_type=kind.type)
  return value


OptionsType = TypeVar('OptionsType', bound=Options)


def from_config(
  cls: type[OptionsType], config: OptionValues, key: str = ''
) -> OptionsType:
  """Returns a section of a config as options.

  Args:
    cls: The class of the options.
    config: The section, as plain data or a ConfigDict. Keys that it lacks have their
      defaults.
    key: The dotted key of the section; '' for the whole config.

  Raises:
    ConfigError: If a key is unknown, or a value has another type or is out of range.
  """
  kinds = field_kinds(cls)
  prefix = f'{key}.' if key else ''
  values = {}
  for name, value in config.items():
    if name not in kinds:
      where = f'config.{key}' if key else 'config'
      raise unknown_name_error(name, kinds, 'key', where)
    values[name] = _option_value(kinds[name], value, f'{prefix}{name}')
  try:
    return cls(**values)
  except OptionError as error:
    raise ConfigError(f'{prefix}{error}') from error


def _option_value(kind: Kind, value: Any, key: str) -> Any:
  holds_options = kind.type in (Options, Mapping)
  if holds_options != isinstance(value, Mapping | ConfigDict):
    what = 'a section' if holds_options else 'a value'
    raise ConfigError(f'config.{key}={value!r} must be {what}')
  if not holds_options:
    return value
  if kind.type is Mapping and kind.options is None:
    return dict(value)
  assert kind.options is not None
  if kind.type is Mapping:
    return {
      name: from_config(kind.options, section, f'{key}.{name}')
      for name, section in value.items()
    }
  return from_config(kind.options, value, key)


def make_section(
  fn: Configurable, values: OptionValues | None = None, **overrides: object
) -> ConfigDict:
  """Makes a section from the keyword-only options of a function or class.

  Args:
    fn: The function or class, whose keyword-only parameters with defaults become keys,
      typed by their annotations.
    values: Further keys, typed by their values; the function's own take precedence.
    **overrides: Other values for some of those keys.

  Returns:
    The section.

  Raises:
    ConfigError: If an override names no option or has another type.
  """
  hints, own = option_types(fn), defaults(fn)
  config = ConfigDict({k: v for k, v in (values or {}).items() if k not in own})
  for key, value in own.items():
    config[key] = _config_value(value_kind(hints.get(key)), value)
  where = f'make_section({getattr(unwrap(fn), "__name__", fn)!s})'
  update_section(config, overrides, where)
  notes = describe_options(fn)
  describe_keys(config, {k: v for k, v in notes.items() if k in config})
  return config


def update_section(config: ConfigDict, values: OptionValues, where: str) -> None:
  """Sets keys of a section, and of the sections in it.

  Args:
    config: The section, changed in place.
    values: The values by key; of a section, a mapping.
    where: What error messages begin with.

  Raises:
    ConfigError: If there is no such key, or a value has another type.
  """
  for key, value in values.items():
    if key not in config:
      raise unknown_name_error(key, config.keys(), 'option', where)
    section: Any = config[key]
    if isinstance(section, ConfigDict) and len(section):
      update_section(section, value, f'{where}: {key}')
      continue
    try:
      config[key] = value
    except (TypeError, ValueError) as error:
      raise ConfigError(f'{where}: option {key!r}: {error}') from error


def describe_keys(config: ConfigDict, descriptions: Mapping[str, str]) -> None:
  """Attaches descriptions to the keys of one section, beside those it has.

  Args:
    config: A section. They are not keys of it, and copies do not have them.
    descriptions: A sentence about each key, by name.
  """
  known = descriptions_of(config) | dict(descriptions)
  object.__setattr__(config, '_descriptions', known)


def descriptions_of(config: ConfigDict) -> dict[str, str]:
  """Returns a sentence about each key of one section, where there is one."""
  return vars(config).get('_descriptions', {})


_ENTRY = re.compile(r'^( +)\*{0,2}(\w+)(?: \([^)]*\))?: +(.*)$')
_SECTION = re.compile(r'^( *)(Args|Attributes|Keyword Args):$')


def describe_options(fn: Configurable) -> dict[str, str]:
  """Reads what a Google-style docstring says about each parameter.

  Args:
    fn: A function or class; of a class, the docstring of its `__init__` counts too.

  Returns:
    What an `Options` class says of its fields; elsewhere the first sentence of each
    entry under `Args:` or `Attributes:`, by name, the base classes' first.
  """
  function = unwrap(fn)
  notes: dict[str, str] = {}
  if not isinstance(function, type):
    for source in reversed(getattr(function, 'option_sources', ())):
      notes |= describe_options(source)
    return {**notes, **_read_entries(inspect.getdoc(function) or '')}
  if issubclass(function, Options):
    return descriptions(function)
  for cls in reversed(function.__mro__[:-1]):
    for holder in (cls, vars(cls).get('__init__')):
      text = getattr(holder, '__doc__', None)
      notes |= _read_entries(inspect.cleandoc(text or ''))
  return notes


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


def option_types(source: Configurable) -> dict[str, Any]:
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


def takes_options_of(
  *sources: Callable[..., Any],
) -> Callable[[Definition], Definition]:
  """Declares that a function passes its `**options` on, and to what.

  Calls of the function are checked against their signatures, as if their options were
  its own.

  Args:
    *sources: Functions or classes; the first that has an option defines it.

  Returns:
    A decorator that returns the function itself.
  """

  def attach(function: Definition) -> Definition:
    signature = inspect.signature(function)
    own = signature.parameters.values()
    options = {p.name: p for p in own if p.kind is not p.VAR_KEYWORD}
    for source in sources:
      parameters = inspect.signature(source).parameters
      for name in defaults(source):
        options.setdefault(name, parameters[name])
    signature = signature.replace(parameters=list(options.values()))
    setattr(function, '__signature__', signature)  # noqa: B010  # any function has it
    setattr(function, 'option_sources', sources)  # noqa: B010
    return function

  return attach
