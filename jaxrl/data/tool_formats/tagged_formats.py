"""Formats that write each parameter between tags, without quotes.

Values get their types back from the schemas of the tools.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.data.tool_formats.literal_formats import LiteralReader
from jaxrl.data.tool_formats.tool_format import (
  Calls,
  MalformedCallError,
  ToolCall,
  ToolFormat,
  Tools,
  dump_json,
  read_json,
  scan_blocks,
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


def _allowed_types(schema: Mapping[str, object]) -> frozenset[str]:
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


def _is_type(value: object, name: str) -> bool:
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


def restore_value(text: str, schema: Mapping[str, object]) -> Any:
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


def _tagged(
  name: str,
  *,
  opening: str,
  parameter: str,
  end: str,
  written: tuple[str, str],
  wrappers: tuple[str, str],
  marker: str,
  per_call: bool = True,
) -> ToolFormat:
  """Makes a format with tags.

  Args:
    name: The format's name.
    opening: A pattern of what opens a call, with a group `name`.
    parameter: A pattern of a parameter, with groups `key` and `value`.
    end: What closes a call.
    written: How the opening with its `{name}`, and a parameter with its `{key}` and
      `{value}`, are written.
    wrappers: What stands around a call, or around all of them; may be empty.
    marker: The first letters of an opening.
    per_call: Whether each call has its own wrapper.
  """
  pattern = re.compile(parameter, re.DOTALL)

  def read(text: str, match: re.Match[str], tools: Tools) -> tuple[Calls, int]:
    at, function = match.end(), match['name'].strip()
    arguments = {}
    if not function:
      raise MalformedCallError('it does not begin with the name of a tool')
    if text.find(end, at) < 0:
      raise MalformedCallError(f'it does not end with {end}')
    while not text.startswith(end, at := skip_space(text, at)):
      found = pattern.match(text, at)
      if found is None:
        raise MalformedCallError(
          f'something that is no parameter stands before {end}: {text[at : at + 40]!r}'
        )
      key, at = found['key'].strip(), found.end()
      schema = find_schema(tools, function, key)
      arguments[key] = restore_value(found['value'], schema)
    return [{'name': function, 'arguments': arguments}], at + len(end)

  def write(calls: Sequence[ToolCall]) -> str:
    texts = []
    for call in calls:
      parts = [written[0].format(name=call['name'])]
      for key, value in call['arguments'].items():
        text = value if isinstance(value, str) else dump_json(value)
        parts.append(written[1].format(key=key, value=text))
      text = ''.join(parts) + end
      texts.append(f'{wrappers[0]}{text}{wrappers[1]}' if per_call else text)
    body = '\n'.join(texts)
    return body if per_call else f'{wrappers[0]}{body}{wrappers[1]}'

  tags = wrappers[0].strip(), wrappers[1].strip()
  scan = functools.partial(
    scan_blocks,
    opening=re.compile(opening),
    read=read,
    ends=(end,),
    wrappers=tags if tags[0] else (),
  )
  markers = tuple(filter(None, (tags[0], marker)))
  return ToolFormat(name, scan, write, markers, ends=(end, *filter(None, tags[1:])))


def _functions(name: str, tag: str) -> ToolFormat:
  """Makes Qwen3-Coder's format in a wrapper of the given tag."""
  return _tagged(
    name,
    opening=r'<function=(?P<name>[^>\n]+)>',
    parameter=r'<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>'
    r'(?=\s*(?:<parameter=|</function>))',
    end='</function>',
    written=('<function={name}>\n', '<parameter={key}>\n{value}\n</parameter>\n'),
    wrappers=(f'<{tag}>\n', f'\n</{tag}>'),
    marker='<function=',
  )


def _invocations(name: str, prefix: str, wrapper: str) -> ToolFormat:
  """Makes the format of `<invoke name="…"><parameter name="…">`."""
  return _tagged(
    name,
    opening=rf'<{prefix}invoke name="?(?P<name>[^>"\n]+)"?>',
    parameter=rf'<{prefix}parameter name="?(?P<key>[^>"\n]+)"?[^>\n]*>(?P<value>.*?)'
    rf'</{prefix}parameter>(?=\s*(?:<{prefix}parameter |</{prefix}invoke>))',
    end=f'</{prefix}invoke>',
    written=(
      f'<{prefix}invoke name="{{name}}">\n',
      f'<{prefix}parameter name="{{key}}">{{value}}</{prefix}parameter>\n',
    ),
    wrappers=(f'<{wrapper}>\n', f'\n</{wrapper}>'),
    marker=f'<{prefix}invoke',
    per_call=False,
  )


QWEN3_CODER = _functions('Qwen3-Coder', 'tool_call')
SEED = _functions('Seed', 'seed:tool_call')
MINIMAX = _invocations('MiniMax', '', 'minimax:tool_call')
MUSE = _invocations('Muse', 'atem:', 'atem:function_calls')
GLM = _tagged(
  'GLM 4.5',
  opening=r'<tool_call>\s*(?P<name>[^\s<{]*)',
  parameter=r'<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>'
  r'(?=\s*(?:<arg_key>|</tool_call>))',
  end='</tool_call>',
  written=(
    '<tool_call>{name}\n',
    '<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n',
  ),
  wrappers=('', ''),
  marker='<tool_call>',
)
