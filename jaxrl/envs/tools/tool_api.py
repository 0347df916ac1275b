"""ToolProvider is the protocol of tools: schemas for the model, and calls.

A call returns text or raises a ToolError.
"""

from collections.abc import Mapping
from typing import Any, Literal, Protocol

# {'type': 'function', 'function': {'name', 'description', 'parameters': JSON Schema}}
ToolSchema = dict[str, Any]
ToolArguments = dict[str, Any]  # by name, as the model gave them

# Why a call has no result: it cannot be parsed, names no tool, has wrong arguments,
# exceeds the number of calls or the time limit, or the tool itself failed.
ToolErrorKind = Literal[
  'unreadable', 'unknown', 'arguments', 'refused', 'timeout', 'failed'
]


class ToolError(Exception):
  """Reports a call without a result; the text tells the model what to do about it.

  Args:
    kind: What kind of error it is.
    text: The message for the model.

  Attributes:
    kind: What kind of error it is.
  """

  def __init__(self, kind: ToolErrorKind, text: str):
    super().__init__(text)
    self.kind: ToolErrorKind = kind


class ToolProvider(Protocol):
  """Protocol of one or several related tools, for one environment. All calls block.

  Its options are keyword-only. The constructor raises ValueError for wrong ones and
  starts nothing.
  """

  def start(self) -> list[ToolSchema]:
    """Starts an episode.

    Returns:
      The schemas of the tools that can be called in it.
    """
    ...

  def call(self, name: str, arguments: ToolArguments, *, seconds: float) -> str:
    """Calls a tool.

    Args:
      name: The name of the tool.
      arguments: The arguments by name.
      seconds: The time limit.

    Returns:
      The result.

    Raises:
      ToolError: If there is no result. Any other error is the environment's failure,
        not the model's.
    """
    ...

  def close(self) -> None:
    """Ends what was started, from any thread and repeatedly; `start` begins anew."""
    ...


def tool_schema(
  name: str, description: str, properties: Mapping[str, object], required: list[str]
) -> ToolSchema:
  """Builds the schema of a tool.

  Args:
    name: The name of the tool.
    description: What it does, for the model.
    properties: The JSON Schema of each argument by name.
    required: The names of the required arguments.

  Returns:
    The schema in the form of OpenAI's API.
  """
  parameters = {
    'type': 'object',
    'properties': dict(properties),
    'required': required,
  }
  function = {'name': name, 'description': description, 'parameters': parameters}
  return {'type': 'function', 'function': function}


_TYPES_BY_NAME: dict[str, tuple[type, ...]] = {
  'string': (str,),
  'integer': (int,),
  'number': (int, float),
  'boolean': (bool,),
  'array': (list,),
  'object': (dict,),
}


def check_arguments(tool: ToolSchema, arguments: ToolArguments) -> None:
  """Checks the names and types of a call's arguments against the schema.

  Args:
    tool: The schema.
    arguments: The arguments by name.

  Raises:
    ToolError: If an argument is unknown, missing or of the wrong type.
  """
  name, parameters = tool['function']['name'], tool['function']['parameters']
  properties = parameters['properties']
  signature = f'{name} takes {", ".join(properties) or "no arguments"}'
  for argument, value in arguments.items():
    if argument not in properties:
      raise ToolError('arguments', f'no argument {argument[:50]!r}: {signature}')
    schema = properties[argument]
    kind = schema.get('type')
    if kind and not _fits(value, kind):
      raise ToolError('arguments', f'{argument!r} of {name} must be of type {kind}')
    if 'enum' in schema and value not in schema['enum']:
      choices = ', '.join(repr(choice) for choice in schema['enum'])
      raise ToolError('arguments', f'{argument!r} of {name} must be one of {choices}')
  for argument in parameters['required']:
    if argument not in arguments:
      raise ToolError('arguments', f'argument {argument!r} is missing: {signature}')


def _fits(value: object, kind: str) -> bool:
  if isinstance(value, bool):
    return kind == 'boolean'
  return isinstance(value, _TYPES_BY_NAME[kind])
