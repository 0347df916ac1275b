"""A part of an algorithm: a function, options fixed on it, and the columns it reads."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl import signature
from jaxrl.signature import ConfigError


@dataclasses.dataclass(frozen=True)
class Part:
  """A function with some options fixed; equal and hashable by value, unlike partial."""

  fn: Callable[..., Any]
  options: tuple[tuple[str, Any], ...] = ()

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    return self.fn(*args, **dict(self.options), **kwargs)


def options_of(part: Callable[..., Any]) -> dict[str, Any]:
  """The options fixed on a part, by name."""
  if isinstance(part, Part):
    return dict(part.options)
  if isinstance(part, functools.partial):
    return options_of(part.func) | part.keywords
  return {}


def function_of(part: Callable[..., Any]) -> Callable[..., Any]:
  """The plain function of a part."""
  function = signature.unwrap(part)
  return function.fn if isinstance(function, Part) else function


def columns(part: Callable[..., Any], *, required: bool = False) -> tuple[str, ...]:
  """The columns a part reads: its positional parameters, in order.

  required: leave out those with a default, which the part can do without.
  """
  return tuple(
    name
    for name, parameter in inspect.signature(function_of(part)).parameters.items()
    if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    and not (required and parameter.default is not parameter.empty)
  )


def call_part(
  part: Callable[..., Any],
  columns_by_name: Mapping[str, Any],
  numbers: Mapping[str, Any] | None = None,
) -> Any:
  """Calls a part with the columns it names, and `numbers` as further options.

  Raises ConfigError when a column it requires is absent or None.
  """
  required = columns(part, required=True)
  given = {}
  for name in columns(part):
    value = columns_by_name.get(name)
    if value is not None:
      given[name] = value
    elif name in required:
      have = sorted(k for k, v in columns_by_name.items() if v is not None)
      raise ConfigError(
        f"{function_of(part).__name__} reads the column '{name}', which this batch "
        f'does not have. It has: {", ".join(have)}.'
      )
  return part(**given, **(numbers or {}))
