"""FunctionTool turns a user's own function into a tool.

The function's signature and docstring define the schema.
"""

import inspect
import json
import types
import typing
from collections.abc import Callable

from jaxrl.envs.graders.grader_processes import (
  GraderError,
  GraderFailure,
  GraderTimeout,
  shared_grader_pool,
)
from jaxrl.envs.tools.tool_api import (
  ToolArguments,
  ToolError,
  ToolSchema,
  check_arguments,
  tool_schema,
)
from jaxrl.options import OptionValues, check_options
from jaxrl.user_code import import_object

_TYPES = {str: 'string', int: 'integer', float: 'number', bool: 'boolean'}
_TYPES |= {list: 'array', tuple: 'array', dict: 'object'}


class FunctionTool:
  """Calls a function 'package.module:function' or 'file.py:function'.

  Its plain parameters are the model's arguments, its keyword-only ones options of the
  config. It runs in a process of at most 4 GiB, which is killed when a call takes
  longer than `timeout` seconds. It returns text, or what JSON can hold. The model is
  told what it raises.

  Args:
    target: The function.
    options: Its keyword-only arguments.
    timeout: Seconds that a call may take.

  Raises:
    ValueError: If the function, its signature or an option is wrong.
  """

  def __init__(self, target: str, options: OptionValues, *, timeout: float = 10.0):
    self._target = target
    self._options = dict(options)
    self._timeout = timeout
    function = import_object(target)
    where = f'tool {target!r}'
    check_options(function, self._options, where)
    self._schema = function_schema(function, where)
    missing = [
      name
      for name, parameter in inspect.signature(function).parameters.items()
      if parameter.kind is parameter.KEYWORD_ONLY
      and parameter.default is parameter.empty
      and name not in self._options
    ]
    if missing:
      raise ValueError(f'{where}: option {missing[0]!r} must be set')

  def start(self) -> list[ToolSchema]:
    """Returns the function's schema."""
    return [self._schema]

  def call(self, name: str, arguments: ToolArguments, *, seconds: float) -> str:
    """Calls the function in a separate process."""
    check_arguments(self._schema, arguments)
    limit = min(seconds, self._timeout)
    arguments_and_options = {**arguments, **self._options}
    try:
      result = shared_grader_pool().call(
        self._target, options=arguments_and_options, limit=limit
      )
    except GraderTimeout as error:
      raise ToolError('timeout', f'{name} was stopped after {limit:g} s') from error
    except GraderFailure as error:
      raise ToolError('failed', f'{name} ended without a result') from error
    except GraderError as error:
      # The model is not shown where on this machine the function lies.
      raise ToolError('failed', error.raised or str(error)) from error
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)

  def close(self) -> None:
    """Does nothing."""
    pass


def function_schema(function: Callable[..., object], where: str) -> ToolSchema:
  """Derives the schema of a function.

  Args:
    function: The function.
    where: The name of the tool, for error messages.

  Returns:
    The schema.

  Raises:
    ValueError: If there is no docstring or a parameter cannot be described.
  """
  description = inspect.getdoc(function)
  if not description:
    raise ValueError(
      f'{where}: it needs a docstring, which tells the model what it does'
    )
  hints = typing.get_type_hints(function)
  properties: dict[str, ToolSchema] = {}
  required: list[str] = []
  for name, parameter in inspect.signature(function).parameters.items():
    if parameter.kind is parameter.KEYWORD_ONLY:
      continue
    if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
      raise ValueError(
        f'{where}: parameter {name!r} cannot be described: give each argument a name'
      )
    properties[name] = _property(hints.get(name))
    if parameter.default is parameter.empty:
      required.append(name)
  return tool_schema(function.__name__, description, properties, required)


def _property(annotation: object) -> ToolSchema:
  """Returns the JSON Schema of an annotation; a missing one allows anything."""
  origin = typing.get_origin(annotation)
  if origin is typing.Literal:
    return {'enum': list(typing.get_args(annotation))}
  if origin in (typing.Union, types.UnionType):
    union_members = [
      kind for kind in typing.get_args(annotation) if kind is not types.NoneType
    ]
    return _property(union_members[0]) if len(union_members) == 1 else {}
  kind = _TYPES.get(origin or annotation)
  if kind is None:
    return {}
  items = typing.get_args(annotation)
  if kind == 'array' and items and items[0] in _TYPES:
    return {'type': kind, 'items': {'type': _TYPES[items[0]]}}
  return {'type': kind}
