"""Config sections read off signatures, so that a default is written once."""

import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict, FieldReference

from jaxrl.signature import ConfigError, defaults, unknown, unwrap

# A ConfigDict for the type checker: its attributes exist at run time alone.
Config = Any


class Optional(FieldReference):
  """A typed value that may also be None, as its annotation `T | None` says."""


class Options(dict[str, Any]):
  """Some of a signature's options: name → default, with their annotations."""

  def __init__(self, values: Mapping[str, Any], hints: Mapping[str, Any]):
    super().__init__(values)
    self.hints = dict(hints)


def take(fn: Callable[..., Any], *names: str) -> Options:
  """The named options of `fn`, for `section`. Raises ConfigError for a stranger."""
  own = defaults(fn)
  for name in names:
    if name not in own:
      raise unknown(name, own, 'option', f'take({getattr(fn, "__name__", fn)})')
  return Options({name: own[name] for name in names}, _hints(fn))


def leave(fn: Callable[..., Any], *names: str) -> Options:
  """The options of `fn` but those named, which are set elsewhere."""
  take(fn, *names)
  own = defaults(fn)
  return Options({k: v for k, v in own.items() if k not in names}, _hints(fn))


def section(
  *sources: Callable[..., Any] | Mapping[str, Any], **overrides: Any
) -> ConfigDict:
  """Makes a ConfigDict of the keyword-only options of functions or classes.

  sources: callables, whose keyword-only parameters with defaults become keys, typed
    by their annotations; what `take` and `leave` give, likewise; or plain mappings of
    key → default, typed by their values. A key of several sources has the last one's
    default and type.
  overrides: other values for some of those keys. What a config sets, it sets here,
    and all else stays as the signature has it.

  Raises ConfigError when an override names no option or has another type.
  """
  config = ConfigDict()
  names = []
  for source in sources:
    if isinstance(source, Mapping):
      options, hints = source, getattr(source, 'hints', {})
      names.append('mapping')
    else:
      options, hints = defaults(source), _hints(source)
      names.append(getattr(unwrap(source), '__name__', repr(source)))
    for key, value in options.items():
      with config.ignore_type():
        config[key] = _field(value, hints.get(key))
  where = f'section({", ".join(names)})'
  for key, value in overrides.items():
    if key not in config:
      raise unknown(key, config.keys(), 'option', where)
    try:
      config[key] = value
    except (TypeError, ValueError) as error:
      raise ConfigError(f'{where}: option {key!r}: {error}') from error
  return config


def _field(value: Any, hint: Any) -> Any:
  """The value to store: a mapping as a section, a typed reference where None may be."""
  if isinstance(value, Mapping) and not isinstance(value, ConfigDict):
    return ConfigDict(dict(value))
  kind, optional = _kind(hint)
  if kind is float and isinstance(value, int) and not isinstance(value, bool):
    value = float(value)
  if kind and optional and (value is None or isinstance(value, kind)):
    return Optional(value, field_type=kind)
  return value


def _kind(hint: Any) -> tuple[type | None, bool]:
  """`float | None` → (float, True); what is not one plain type → (None, …)."""
  members = [hint]
  if typing.get_origin(hint) in (typing.Union, types.UnionType):
    members = list(typing.get_args(hint))
  plain = [m for m in members if m is not type(None)]
  kind = plain[0] if len(plain) == 1 else None
  kind = typing.get_origin(kind) or kind
  if kind not in (bool, int, float, str, tuple):
    kind = None
  return kind, len(plain) < len(members)


def _hints(source: Callable[..., Any]) -> dict[str, Any]:
  """Annotations by parameter name; none where they cannot be evaluated."""
  function = unwrap(source)
  target = function.__init__ if isinstance(function, type) else function
  try:
    return typing.get_type_hints(target)
  except (NameError, TypeError, AttributeError):
    return {}
