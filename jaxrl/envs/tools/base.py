"""What tools are: schemas for the model, and calls that end in text or a ToolError."""

from collections.abc import Mapping
from typing import Any, Literal, Protocol

# {'type': 'function', 'function': {'name', 'description', 'parameters': JSON Schema}}
Schema = dict[str, Any]

# Why a call gave no result: it cannot be read, names no tool, has the wrong arguments,
# is one too many; it took too long; the tool itself failed.
Fault = Literal['unreadable', 'unknown', 'arguments', 'refused', 'timeout', 'failed']


class ToolError(Exception):
  """A call without a result; the text tells the model what to do about it."""

  def __init__(self, fault: Fault, text: str):
    super().__init__(text)
    self.fault: Fault = fault


class Tools(Protocol):
  """One tool or several of a kind, for one environment. All calls block.

  Its options are keyword-only. What is wrong with them the constructor says, as
  ConfigError; it starts nothing.
  """

  def start(self) -> list[Schema]:
    """Begins an episode; what can be called in it."""
    ...

  def call(self, name: str, arguments: dict[str, Any], *, seconds: float) -> str:
    """The result. seconds: the most that it may take.

    Raises ToolError; anything else is the environment's failure, not the model's.
    """
    ...

  def close(self) -> None:
    """Ends what was started. From any thread, more than once; `start` begins anew."""
    ...


def schema(
  name: str, description: str, properties: Mapping[str, Any], required: list[str]
) -> Schema:
  """The schema of a tool. properties: the JSON Schema of each argument by name."""
  parameters = {
    'type': 'object',
    'properties': dict(properties),
    'required': required,
  }
  function = {'name': name, 'description': description, 'parameters': parameters}
  return {'type': 'function', 'function': function}


_KINDS: dict[str, tuple[type, ...]] = {
  'string': (str,),
  'integer': (int,),
  'number': (int, float),
  'boolean': (bool,),
  'array': (list,),
  'object': (dict,),
}


def check(tool: Schema, arguments: Mapping[str, Any]) -> None:
  """Raises ToolError unless the arguments' names and kinds are the schema's."""
  name, parameters = tool['function']['name'], tool['function']['parameters']
  properties = parameters['properties']
  takes = f'{name} takes {", ".join(properties) or "no arguments"}'
  for argument, value in arguments.items():
    if argument not in properties:
      raise ToolError('arguments', f'no argument {argument[:50]!r}: {takes}')
    wanted = properties[argument]
    kind = wanted.get('type')
    if kind and not _fits(value, kind):
      raise ToolError('arguments', f'{argument!r} of {name} must be of type {kind}')
    if 'enum' in wanted and value not in wanted['enum']:
      choices = ', '.join(repr(choice) for choice in wanted['enum'])
      raise ToolError('arguments', f'{argument!r} of {name} must be one of {choices}')
  for argument in parameters['required']:
    if argument not in arguments:
      raise ToolError('arguments', f'argument {argument!r} is missing: {takes}')


def _fits(value: Any, kind: str) -> bool:
  if isinstance(value, bool):
    return kind == 'boolean'
  return isinstance(value, _KINDS[kind])
