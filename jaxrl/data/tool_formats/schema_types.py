"""Values that a format writes without quotes get their types back from a schema."""

from collections.abc import Mapping
from typing import Any

from jaxrl.data.tool_formats.literal_reader import LiteralReader
from jaxrl.data.tool_formats.tool_format import (
  MalformedCallError,
  Tools,
  read_json,
  skip_space,
)

_PYTHON_WORDS = {'True': True, 'False': False, 'None': None}
_JSON_TYPES = {
  'boolean': bool,
  'integer': int,
  'number': (int, float),
  'string': str,
  'array': list,
  'object': dict,
  'null': type(None),
}
_ANY = frozenset(_JSON_TYPES)


def find_schema(tools: Tools, name: str, key: str) -> Mapping[str, Any]:
  """Returns the JSON schema of a tool's parameter, or an empty one.

  Args:
    tools: The tools in the form of OpenAI's API, or their inner part alone.
    name: The tool.
    key: The parameter.
  """
  for tool in tools:
    function = tool.get('function', tool)
    if not isinstance(function, Mapping) or function.get('name') != name:
      continue
    parameters = function.get('parameters')
    properties = parameters.get('properties') if isinstance(parameters, Mapping) else {}
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}
  return {}


def _allowed_types(schema: Mapping[str, Any]) -> frozenset[str]:
  """Returns which JSON types a schema allows, as far as it says."""
  declared = schema.get('type')
  if isinstance(declared, str):
    return frozenset([declared.lower()]) & _ANY or _ANY
  if isinstance(declared, list):
    return frozenset(str(one).lower() for one in declared) & _ANY or _ANY
  for key in ('anyOf', 'oneOf'):
    options = schema.get(key)
    if isinstance(options, list):
      parts = [_allowed_types(one) for one in options if isinstance(one, Mapping)]
      return frozenset().union(*parts) or _ANY
  choices = schema.get('enum', [schema['const']] if 'const' in schema else None)
  if isinstance(choices, list) and choices:
    return frozenset(
      name for name in _JSON_TYPES if any(_is_type(choice, name) for choice in choices)
    )
  return _ANY


def _is_type(value: Any, name: str) -> bool:
  if isinstance(value, bool):
    return name == 'boolean'
  if name == 'integer' and isinstance(value, float):
    return value.is_integer()
  return isinstance(value, _JSON_TYPES[name])


def _read_literal(text: str) -> Any:
  """Reads JSON, or a word or a container as Python writes it; else the text itself."""
  word = text.strip()
  if word in _PYTHON_WORDS:
    return _PYTHON_WORDS[word]
  try:
    value, end = read_json(text, 0)
    if skip_space(text, end) == len(text):
      return value
  except MalformedCallError:
    pass
  if word.startswith(('{', '[')):
    reader = LiteralReader(word, 0, ("'", '"'))
    try:
      value = reader.value()
      if reader.at == len(word):
        return value
    except MalformedCallError:
      pass
  return text


def restore_value(text: str, schema: Mapping[str, Any]) -> Any:
  """Returns the value that a parameter's text stands for.

  A parameter that may only be a string is one. Any other is read as JSON, or as
  Python's True, False, None or containers, where the schema allows the outcome; what
  is neither is a string, for the tool to refuse.

  Args:
    text: What the model wrote.
    schema: The parameter's JSON schema; an empty one allows everything.
  """
  allowed = _allowed_types(schema)
  if allowed == {'string'}:
    return text
  value = _read_literal(text)
  if 'boolean' in allowed and text.strip().lower() in ('true', 'false'):
    value = text.strip().lower() == 'true'
  if any(_is_type(value, name) for name in allowed):
    return value
  return text if 'string' in allowed else value
