"""The tools of an environment: made from a call string, called within limits."""

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, get_args

from jaxrl import signature
from jaxrl.data.tool_calls import Call, Unreadable
from jaxrl.envs.tools.base import Fault, Schema, ToolError, Tools
from jaxrl.envs.tools.own import Own
from jaxrl.types import Message

TOOLS = {
  'mcp': 'jaxrl.envs.tools.mcp:Mcp',
  'python': 'jaxrl.envs.tools.python:Python',
  'search': 'jaxrl.envs.tools.search:Search',
}
# Of calls that the model should not have made.
WRONG: frozenset[Fault] = frozenset(('unreadable', 'unknown', 'arguments', 'refused'))


def make_tools(spec: str) -> list[Tools]:
  """The tools that a call string such as `python + search(corpus='wiki.jsonl')` names.

  Each is one of TOOLS, or one's own, 'package.module:name' or 'file.py:name': a class
  like `base.Tools`, or a function, see `own.Own`. Raises ConfigError.
  """
  made: list[Tools] = []
  for name, options in signature.parse_calls(spec):
    where = f'tool {name!r}'
    if name not in TOOLS and ':' not in name:
      raise signature.unknown(name, TOOLS, 'tool', 'tools')
    found: Callable[..., Any] = signature.resolve(TOOLS.get(name, name))
    if isinstance(found, type):
      signature.check_options(found, options, where)
      made.append(found(**options))
    else:
      limit = {'timeout': options.pop('timeout')} if 'timeout' in options else {}
      signature.check_options(Own, limit, where)
      made.append(Own(name, options, **limit))
  if not made:
    raise signature.ConfigError("tools: name at least one, as in 'python'")
  return made


class Toolbox:
  """Calls tools for one environment, and counts what comes of it.

  max_calls, max_calls_per_turn: of an episode, of a reply; those beyond are refused.
  max_chars: of a result; its middle is left out. seconds: of all calls of a reply.
  """

  def __init__(
    self,
    tools: Sequence[Tools],
    *,
    max_calls: int,
    max_calls_per_turn: int,
    max_chars: int,
    seconds: float,
  ):
    self._all = list(tools)
    self._max_calls, self._max_calls_per_turn = max_calls, max_calls_per_turn
    self._max_chars, self._seconds = max_chars, seconds
    self._owners: dict[str, Tools] = {}
    self._counts: Counter[str] = Counter()

  def start(self) -> list[Schema]:
    """Begins an episode; the schemas of all tools. ConfigError if two share a name."""
    self._owners, self._counts, schemas = {}, Counter(), []
    for tools in self._all:
      for schema in tools.start():
        name = schema['function']['name']
        if name in self._owners:
          raise signature.ConfigError(
            f'two tools are called {name!r}: give one another name, as in '
            "python(name='interpreter')"
          )
        self._owners[name] = tools
        schemas.append(schema)
    return schemas

  def run(
    self, calls: Sequence[Call | Unreadable]
  ) -> tuple[list[Message], list[Fault]]:
    """A message of the role `tool` for each call, in order; the faults of those that
    gave no result.
    """
    end = time.monotonic() + self._seconds
    messages: list[Message] = []
    faults: list[Fault] = []
    for number, call in enumerate(calls):
      name = 'unknown'
      if not isinstance(call, Unreadable):
        name = _plain(call['name'][:64])
      self._counts['calls'] += 1
      try:
        text = self._call(call, number, end - time.monotonic())
        self._counts[f'{name}/calls'] += 1
      except ToolError as error:
        self._counts[error.fault] += 1
        faults.append(error.fault)
        text = f'Error: {error}'
      messages.append({'role': 'tool', 'name': name, 'content': self._cut(text)})
    return messages, faults

  def _call(self, call: Call | Unreadable, number: int, left: float) -> str:
    if isinstance(call, Unreadable):
      raise ToolError('unreadable', f'the call cannot be read: {call.reason}')
    if number >= self._max_calls_per_turn:
      most = f'{self._max_calls_per_turn} in one reply'
      raise ToolError('refused', f'too many calls: at most {most}')
    if self._counts['calls'] > self._max_calls:
      told = f'no calls are left: there were {self._max_calls}. Answer without one'
      raise ToolError('refused', told)
    if left <= 0:
      most = f'within {self._seconds:g} s'
      raise ToolError('timeout', f'not called: the calls of a reply must end {most}')
    name = call['name']
    if name not in self._owners:
      there = ', '.join(self._owners)
      raise ToolError('unknown', f'no tool {name[:64]!r}; there are {there}')
    # Half of a surrogate pair is JSON, and yet nothing that could be sent anywhere.
    written = json.dumps(call['arguments'], ensure_ascii=False)
    arguments = json.loads(written.encode('utf-8', 'replace'))
    return self._owners[name].call(name, arguments, seconds=left)

  def _cut(self, text: str) -> str:
    """At most max_chars of it, and nothing that is no text."""
    text = _plain(text)
    if len(text) <= self._max_chars:
      return text
    self._counts['cut'] += 1
    half = self._max_chars // 2
    left_out = f'\n[… {len(text) - 2 * half} characters left out …]\n'
    return text[:half] + left_out + text[len(text) - half :]

  @property
  def metrics(self) -> dict[str, float]:
    """Of the episode: tools/calls, tools/<name>/calls of those that gave a result,
    tools/cut, tools/<fault>, and tools/errors, the sum of the faults.
    """
    faults = get_args(Fault)
    told = {'calls': 0, 'cut': 0, **dict.fromkeys(faults, 0)}
    told |= {f'{name}/calls': 0 for name in self._owners} | dict(self._counts)
    told['errors'] = sum(told[fault] for fault in faults)
    return {f'tools/{name}': float(count) for name, count in told.items()}

  def close(self) -> None:
    """Ends what the tools have started."""
    for tools in self._all:
      tools.close()


def _plain(text: str) -> str:
  """The text without halves of surrogate pairs, which JSON can write."""
  return text.encode('utf-8', 'replace').decode()
