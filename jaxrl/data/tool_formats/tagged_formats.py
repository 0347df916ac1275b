"""Formats that write each parameter between tags, without quotes."""

import functools
import re
from collections.abc import Sequence

from jaxrl.data.tool_formats.schema_types import find_schema, restore_value
from jaxrl.data.tool_formats.tool_format import (
  Calls,
  MalformedCallError,
  ToolCall,
  ToolFormat,
  Tools,
  dump_json,
  scan_blocks,
  skip_space,
)


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
