"""Toolbox holds the tools of an environment and calls them within limits."""

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, get_args

from jaxrl.component_table import Component, ComponentTable
from jaxrl.data.tool_formats import InvalidToolCall, ToolCall
from jaxrl.envs.tools.function_tool import FunctionTool
from jaxrl.envs.tools.tool_api import ToolError, ToolErrorKind, ToolProvider, ToolSchema
from jaxrl.options import check_options, error_prefix, unknown_name_error
from jaxrl.types import Message
from jaxrl.user_code import import_object

TOOLS = ComponentTable(
  'tool',
  'tools',
  {
    'mcp': 'jaxrl.envs.tools.mcp_tools:McpTools',
    'python': 'jaxrl.envs.tools.python_tool:PythonTool',
    'search': 'jaxrl.envs.tools.search_tool:SearchTool',
  },
)
# Of calls that the model should not have made.
INVALID_CALL_KINDS: frozenset[ToolErrorKind] = frozenset(
  ('unreadable', 'unknown', 'arguments', 'refused')
)


def make_tools(
  calls: Sequence[Component] | Component,
) -> list[ToolProvider]:
  """Builds tools.

  Each is one of TOOLS, or a user's own, 'package.module:name' or 'file.py:name': a
  class like `tool_api.ToolProvider`, or a function, see `FunctionTool`.

  Args:
    calls: The tools; the name of one is enough.

  Returns:
    The tools.

  Raises:
    ValueError: If there is no tool, or a name or an option is wrong.
  """
  providers: list[ToolProvider] = []
  for name, options in TOOLS.calls(calls):
    where = f'tool {name!r}'
    if name not in TOOLS and ':' not in name:
      raise unknown_name_error(name, TOOLS, 'tool', 'tools')
    tool: Callable[..., Any] = import_object(TOOLS.get(name, name), where)
    if isinstance(tool, type):
      check_options(tool, options, where)
      with error_prefix(where):
        providers.append(tool(**options))
    else:
      timeout_option = (
        {'timeout': options.pop('timeout')} if 'timeout' in options else {}
      )
      check_options(FunctionTool, timeout_option, where)
      with error_prefix(where):
        providers.append(FunctionTool(name, options, **timeout_option))
  if not providers:
    raise ValueError("tools: name at least one, as in 'python'")
  return providers


class Toolbox:
  """Calls tools for one environment and counts the outcomes.

  Args:
    tools: The tools.
    max_calls: The maximum number of calls of an episode; further ones are refused.
    max_calls_per_turn: The maximum number of calls of a reply; further ones are
      refused.
    max_chars: The maximum number of characters of a result; its middle is left out.
    seconds: The time limit of all calls of a reply.
  """

  def __init__(
    self,
    tools: Sequence[ToolProvider],
    *,
    max_calls: int,
    max_calls_per_turn: int,
    max_chars: int,
    seconds: float,
  ):
    self._providers = list(tools)
    self._max_calls = max_calls
    self._max_calls_per_turn = max_calls_per_turn
    self._max_chars = max_chars
    self._seconds = seconds
    self._owners: dict[str, ToolProvider] = {}
    self._counts: Counter[str] = Counter()

  def start(self) -> list[ToolSchema]:
    """Starts an episode.

    Returns:
      The schemas of all tools.

    Raises:
      ValueError: If two tools have the same name.
    """
    self._owners, self._counts, schemas = {}, Counter(), []
    for tools in self._providers:
      for schema in tools.start():
        name = schema['function']['name']
        if name in self._owners:
          raise ValueError(
            f'two tools are called {name!r}: give one another name, as in '
            "python(name='interpreter')"
          )
        self._owners[name] = tools
        schemas.append(schema)
    return schemas

  def run(
    self, calls: Sequence[ToolCall | InvalidToolCall]
  ) -> tuple[list[Message], list[ToolErrorKind]]:
    """Runs the calls of a reply.

    Args:
      calls: The calls in order.

    Returns:
      A message of the role `tool` for each call, and the errors of those that have no
      result.
    """
    deadline = time.monotonic() + self._seconds
    messages: list[Message] = []
    errors: list[ToolErrorKind] = []
    for number, call in enumerate(calls):
      name = 'unknown'
      if not isinstance(call, InvalidToolCall):
        name = _valid_text(call['name'][:64])
      self._counts['calls'] += 1
      try:
        text = self._call(call, number, deadline - time.monotonic())
        self._counts[f'{name}/calls'] += 1
      except ToolError as error:
        self._counts[error.kind] += 1
        errors.append(error.kind)
        text = f'Error: {error}'
      messages.append({'role': 'tool', 'name': name, 'content': self._cut(text)})
    return messages, errors

  def _call(
    self, call: ToolCall | InvalidToolCall, number: int, seconds_left: float
  ) -> str:
    if isinstance(call, InvalidToolCall):
      raise ToolError('unreadable', f'the call cannot be read: {call.reason}')
    if number >= self._max_calls_per_turn:
      limit = f'{self._max_calls_per_turn} in one reply'
      raise ToolError('refused', f'too many calls: at most {limit}')
    if self._counts['calls'] > self._max_calls:
      message = f'no calls are left: there were {self._max_calls}. Answer without one'
      raise ToolError('refused', message)
    if seconds_left <= 0:
      limit = f'within {self._seconds:g} s'
      raise ToolError('timeout', f'not called: the calls of a reply must end {limit}')
    name = call['name']
    if name not in self._owners:
      names = ', '.join(self._owners)
      raise ToolError('unknown', f'no tool {name[:64]!r}; there are {names}')
    # JSON may contain half of a surrogate pair, which cannot be encoded as UTF-8.
    written = json.dumps(call['arguments'], ensure_ascii=False)
    arguments = json.loads(written.encode('utf-8', 'replace'))
    return self._owners[name].call(name, arguments, seconds=seconds_left)

  def _cut(self, text: str) -> str:
    """Shortens a result to max_chars and removes what is not valid text."""
    if len(text) <= self._max_chars:
      return _valid_text(text)
    self._counts['cut'] += 1
    half = self._max_chars // 2
    left_out = f'\n[… {len(text) - 2 * half} characters left out …]\n'
    return _valid_text(text[:half] + left_out + text[len(text) - half :])

  @property
  def metrics(self) -> dict[str, float]:
    """Returns the counts of the episode.

    They are tools/calls; tools/<name>/calls of those that returned a result; tools/cut;
    tools/<error>; and tools/errors, the sum of the errors.
    """
    kinds = get_args(ToolErrorKind)
    counts = {'calls': 0, 'cut': 0, **dict.fromkeys(kinds, 0)}
    counts |= {f'{name}/calls': 0 for name in self._owners} | dict(self._counts)
    counts['errors'] = sum(counts[fault] for fault in kinds)
    return {f'tools/{name}': float(count) for name, count in counts.items()}

  def close(self) -> None:
    """Ends what the tools have started."""
    for tools in self._providers:
      tools.close()


def _valid_text(text: str) -> str:
  """Removes halves of surrogate pairs, which JSON can contain."""
  return text.encode('utf-8', 'replace').decode()
