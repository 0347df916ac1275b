"""The user's own function as a tool: its signature and docstring are the schema."""

import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl import signature
from jaxrl.envs.graders.processes import GraderError, GraderFault, GraderTimeout, shared
from jaxrl.envs.tools.base import Schema, ToolError, check, schema

_TYPES = {str: 'string', int: 'integer', float: 'number', bool: 'boolean'}
_TYPES |= {list: 'array', tuple: 'array', dict: 'object'}


class Own:
  """A function 'package.module:function' or 'file.py:function'.

  Its plain parameters are the model's arguments, its keyword-only ones options of the
  config. It runs in a process of at most 4 GiB, which is killed when a call takes
  longer than `timeout` seconds; it returns text, or what JSON can hold. What it raises
  is told to the model.
  """

  def __init__(self, target: str, options: Mapping[str, Any], *, timeout: float = 10.0):
    self._target, self._options, self._timeout = target, dict(options), timeout
    function = signature.resolve(target)
    where = f'tool {target!r}'
    signature.check_options(function, self._options, where)
    self._schema = describe(function, where)
    missing = [
      name
      for name, parameter in inspect.signature(function).parameters.items()
      if parameter.kind is parameter.KEYWORD_ONLY
      and parameter.default is parameter.empty
      and name not in self._options
    ]
    if missing:
      raise signature.ConfigError(f'{where}: option {missing[0]!r} has to be set')

  def start(self) -> list[Schema]:
    return [self._schema]

  def call(self, name: str, arguments: dict[str, Any], *, seconds: float) -> str:
    check(self._schema, arguments)
    limit = min(seconds, self._timeout)
    given = {**arguments, **self._options}
    try:
      found = shared().call(self._target, options=given, limit=limit)
    except GraderTimeout as error:
      raise ToolError('timeout', f'{name} was stopped after {limit:g} s') from error
    except GraderFault as error:
      raise ToolError('failed', f'{name} ended without a result') from error
    except GraderError as error:
      told = str(error).removeprefix(f'{self._target}: ')
      raise ToolError('failed', told) from error
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)

  def close(self) -> None:
    pass


def describe(function: Callable[..., Any], where: str) -> Schema:
  """The schema of a function. Raises ConfigError for what none can say."""
  about = inspect.getdoc(function)
  if not about:
    raise signature.ConfigError(
      f'{where}: it needs a docstring, which tells the model what it does'
    )
  hints = typing.get_type_hints(function)
  properties: dict[str, Any] = {}
  required: list[str] = []
  for name, parameter in inspect.signature(function).parameters.items():
    if parameter.kind is parameter.KEYWORD_ONLY:
      continue
    if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
      raise signature.ConfigError(
        f'{where}: parameter {name!r} cannot be told to a model: give each a name'
      )
    properties[name] = _property(hints.get(name))
    if parameter.default is parameter.empty:
      required.append(name)
  return schema(function.__name__, about, properties, required)


def _property(hint: Any) -> dict[str, Any]:
  """The JSON Schema of an annotation; one that has none may be anything."""
  origin = typing.get_origin(hint)
  if origin is typing.Literal:
    return {'enum': list(typing.get_args(hint))}
  if origin in (typing.Union, types.UnionType):
    members = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
    return _property(members[0]) if len(members) == 1 else {}
  kind = _TYPES.get(origin or hint)
  if kind is None:
    return {}
  items = typing.get_args(hint)
  if kind == 'array' and items and items[0] in _TYPES:
    return {'type': kind, 'items': {'type': _TYPES[items[0]]}}
  return {'type': kind}
