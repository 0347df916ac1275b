"""A tool format says how one family of models writes its tool calls."""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class InvalidToolCall:
  """A tool call that could not be parsed.

  Attributes:
    reason: Why, in words for the model that wrote it.
  """

  reason: str


ToolCall = dict[str, Any]  # {'name': str, 'arguments': an object}
Tools = Sequence[Mapping[str, Any]]  # JSON schemas in the form of OpenAI's API
Calls = list[ToolCall | InvalidToolCall]


class MalformedCallError(ValueError):
  """What a model began as a call cannot be read; the text says why."""


@dataclasses.dataclass(frozen=True)
class ToolFormat:
  """How one family of models writes its tool calls.

  Attributes:
    name: The family's name, to be shown to the user.
    scan: Splits a reply into its text and its calls, given the tools' schemas.
    write: Writes calls as the model does after the generation prompt.
    markers: What opens a call or a list of calls. None of it is text for a reader.
    bare: How a reply begins that may be a call without any marker.
    ends: What closes a call or a list of calls.
  """

  name: str
  scan: Callable[[str, Tools], tuple[str, Calls]] = dataclasses.field(repr=False)
  write: Callable[[Sequence[ToolCall]], str] = dataclasses.field(repr=False)
  markers: tuple[str, ...] = ()
  bare: tuple[str, ...] = ()
  ends: tuple[str, ...] = ()

  def parse(self, text: str, tools: Tools = ()) -> tuple[str, Calls]:
    """Splits a reply into its text and its tool calls.

    Args:
      text: The reply without its thought.
      tools: JSON schemas of the tools in the form of OpenAI's API. Formats that write
        values without quotes restore types by them.

    Returns:
      The text around the calls, and the calls in order; an unreadable call is an
      InvalidToolCall. A reply without calls is returned as it is.
    """
    return self.scan(text, tools)

  def render(self, calls: Sequence[ToolCall]) -> str:
    """Writes calls as a model of this family does after the generation prompt.

    Args:
      calls: The calls.
    """
    return self.write(calls)

  def frame(self, name: str) -> tuple[str, str] | None:
    """Returns what stands around the arguments of a tool's call.

    Args:
      name: The tool's name.

    Returns:
      The texts before and after the JSON object; None if calls are written otherwise.
    """
    arguments = {'x': 1}
    text = self.write([{'name': name, 'arguments': arguments}])
    before, found, after = text.partition(dump_json(arguments))
    return (before, after) if found else None

  def may_begin(self, text: str) -> bool:
    """Returns whether a reply that begins like this may be nothing but a tool call.

    Args:
      text: The beginning of the reply.
    """
    start = text.lstrip()
    return any(
      start.startswith(mark) or mark.startswith(start)
      for mark in (*self.markers, *self.bare)
    )


ReadBlock = Callable[[str, re.Match[str], Tools], tuple[Calls, int]]


def scan_blocks(
  text: str,
  tools: Tools,
  *,
  opening: re.Pattern[str],
  read: ReadBlock,
  ends: tuple[str, ...] = (),
  wrappers: tuple[str, ...] = (),
) -> tuple[str, Calls]:
  """Reads calls that each begin with a marker, and the text around them.

  Args:
    text: The reply.
    tools: The tools' schemas.
    opening: Matches what opens a call.
    read: Reads what follows an opening; returns calls and the index after them, or
      raises MalformedCallError.
    ends: What closes a call; the reading goes on there after a malformed one.
    wrappers: What stands around several calls: the opening and the closing.

  Returns:
    The text and the calls.
  """
  pieces: list[str] = []
  calls: Calls = []
  at = 0
  while match := opening.search(text, at):
    piece, num_empty = _without_wrappers(text[at : match.start()], wrappers, True)
    pieces.append(piece)
    calls += _nothing_follows(num_empty, wrappers)
    try:
      found, at = read(text, match, tools)
    except MalformedCallError as error:
      reason, at = _skip(text, match.end(), opening, ends, str(error))
      found = [InvalidToolCall(reason)]
    calls += found
  piece, num_empty = _without_wrappers(text[at:], wrappers, False)
  calls += _nothing_follows(num_empty, wrappers)
  return (join_pieces([*pieces, piece]), calls) if calls else (text, [])


def _without_wrappers(
  piece: str, wrappers: tuple[str, ...], is_followed: bool
) -> tuple[str, int]:
  """Returns a piece's text, and how many wrappers in it have no call.

  The content of such a wrapper is not text either.
  """
  if not wrappers:
    return piece, 0
  before, *blocks = piece.split(wrappers[0])
  texts = [before, *(block.partition(wrappers[1])[2] for block in blocks)]
  num_empty = len(blocks) - (1 if is_followed and blocks else 0)
  return ''.join(texts).replace(wrappers[1], ''), num_empty


def _nothing_follows(count: int, wrappers: tuple[str, ...]) -> Calls:
  reason = f'no readable call follows {wrappers[0]}' if count else ''
  return [InvalidToolCall(reason)] * count


def _skip(
  text: str, at: int, opening: re.Pattern[str], ends: tuple[str, ...], reason: str
) -> tuple[str, int]:
  """Finds where to go on after a malformed call, and why it is one."""
  following = opening.search(text, at)
  limit = following.start() if following else len(text)
  closed = [place + len(end) for end in ends if (place := text.find(end, at)) >= 0]
  if closed and min(closed) <= limit:
    return reason, min(closed)
  return (f'it does not end with {ends[0]}' if ends else reason), limit


def join_pieces(pieces: Sequence[str]) -> str:
  """Joins the text before, between and after calls.

  Args:
    pieces: The pieces of text.

  Returns:
    The pieces that are not empty, a line each; the first keeps its leading space.
  """
  trimmed = [pieces[0].rstrip(), *(piece.strip() for piece in pieces[1:])]
  return '\n'.join(piece for piece in trimmed if piece)


def _refuse_constant(name: str) -> None:
  raise ValueError(f'{name} is no value of JSON')


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)
_SPACE = re.compile(r'\s*')


def skip_space(text: str, at: int) -> int:
  """Returns the index of the first character at or after `at` that is not a space.

  Args:
    text: The text.
    at: Where to begin.
  """
  match = _SPACE.match(text, at)
  return match.end() if match else at


def read_json(text: str, at: int) -> tuple[Any, int]:
  """Reads one JSON value; line ends and tabs within its strings are allowed.

  Args:
    text: The text.
    at: Where the value begins, perhaps after spaces.

  Returns:
    The value and the index after it.

  Raises:
    MalformedCallError: If there is no JSON value.
  """
  body = text[skip_space(text, at) :]
  try:
    value, size = _DECODER.raw_decode(body)
  except (ValueError, RecursionError) as error:
    raise MalformedCallError(f'it is not JSON: {error}') from error
  return value, len(text) - len(body) + size


def expect(text: str, at: int, marker: str) -> int:
  """Returns the index after a marker that must come next, perhaps after spaces.

  Args:
    text: The text.
    at: Where to look.
    marker: The marker.

  Raises:
    MalformedCallError: If something else comes next.
  """
  start = skip_space(text, at)
  if not text.startswith(marker, start):
    if start == len(text):
      raise MalformedCallError(f'it does not end with {marker}')
    raise MalformedCallError(f'it is not JSON: other text stands before {marker}')
  return start + len(marker)


def read_arguments(value: object) -> dict[str, Any]:
  """Returns the arguments of a call as an object.

  Args:
    value: An object, its JSON text, or nothing (None or an empty text), which means
      no arguments.

  Raises:
    MalformedCallError: If it is something else.
  """
  if value is None or (isinstance(value, str) and not value.strip()):
    return {}
  if isinstance(value, str):
    value, _ = read_json(value, 0)
  if not isinstance(value, dict):
    raise MalformedCallError('its "arguments" must be an object')
  return value


def read_call(
  value: object,
  names: Sequence[str] = ('name',),
  arguments: Sequence[str] = ('arguments',),
) -> ToolCall:
  """Returns the call that a JSON object stands for.

  Args:
    value: The object.
    names: The keys under which the tool's name may be.
    arguments: The keys under which the arguments may be.

  Raises:
    MalformedCallError: If it is not a call.
  """
  if not isinstance(value, dict):
    raise MalformedCallError(f'it must be an object with a "{names[0]}", a string')
  name = next((value[key] for key in names if key in value), None)
  if not isinstance(name, str) or not name:
    raise MalformedCallError(f'it must be an object with a "{names[0]}", a string')
  found = next((value[key] for key in arguments if key in value), None)
  return {'name': name, 'arguments': read_arguments(found)}


def dump_json(value: object) -> str:
  """Returns a value's JSON as templates write it, with letters as they are.

  Args:
    value: The value.
  """
  return json.dumps(value, ensure_ascii=False)
