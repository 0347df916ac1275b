"""GPT-OSS writes messages with headers that name a channel and a recipient."""

import dataclasses
import re
from collections.abc import Sequence

from jaxrl.data.tool_formats.tool_format import (
  Calls,
  InvalidToolCall,
  MalformedCallError,
  ToolCall,
  ToolFormat,
  Tools,
  dump_json,
  join_pieces,
  read_arguments,
  read_json,
)

_HEADER = re.compile(
  r'(?:<\|start\|>)?(?:assistant)?(?P<before>\s*to=[^\s<]+)?\s*'
  r'<\|channel\|>\s*(?P<channel>\w+)'
  r'(?P<after>[^<]*(?:<\|constrain\|>[^<]*)?)<\|message\|>'
)
_RECIPIENT = re.compile(r'to=(?:functions\.)?([^\s<]+)')
_END = re.compile(r'<\|(?:end|call|return|start)\|>')
_BEGUN = re.compile(r'(?:<\|start\|>assistant|<\|channel\|>\w*)[^<]*to=')


@dataclasses.dataclass(frozen=True)
class _Part:
  """A message, or text without a header, which has no channel."""

  channel: str
  recipient: str
  body: str
  raw: str


def _split(text: str) -> list[_Part]:
  """Splits a reply into its messages."""
  parts, at = [], 0
  while header := _HEADER.search(text, at):
    if before := text[at : header.start()]:
      parts.append(_Part('', '', before, before))
    recipient = _RECIPIENT.search((header['before'] or '') + header['after'])
    start = header.end()
    if recipient:
      try:
        _, after = read_json(text, start)
      except MalformedCallError:
        after = start
    else:
      after = start
    end = _END.search(text, after)
    stop, at = (end.start(), end.end()) if end else (len(text), len(text))
    if end and end[0] == '<|start|>':
      at = stop
    name = recipient[1] if recipient else ''
    parts.append(
      _Part(header['channel'], name, text[start:stop], text[header.start() : at])
    )
  if rest := text[at:]:
    parts.append(_Part('', '', rest, rest))
  return parts


def _read_part(part: _Part) -> ToolCall | InvalidToolCall:
  try:
    value = read_json(part.body, 0) if part.body.strip() else ({}, len(part.body))
    if part.body[value[1] :].strip():
      raise MalformedCallError('it is not JSON: other text follows the object')
    return {'name': part.recipient, 'arguments': read_arguments(value[0])}
  except MalformedCallError as error:
    return InvalidToolCall(str(error))


def _scan(text: str, tools: Tools) -> tuple[str, Calls]:
  del tools
  parts = _split(text)
  calls: Calls = []
  pieces = []
  for part in parts:
    if part.recipient:
      calls.append(_read_part(part))
    elif not part.channel and (begun := _BEGUN.search(part.body)):
      pieces.append(part.body[: begun.start()])
      calls.append(InvalidToolCall('its header does not end with <|message|>'))
    elif part.channel != 'analysis':
      pieces.append(part.body)
  if not any(part.channel for part in parts) and not calls:
    return text, []
  return join_pieces(pieces or ['']), calls


def split_analysis(text: str) -> tuple[str | None, str]:
  """Splits a reply into what stands in the channel for thoughts, and the rest.

  Args:
    text: The reply.

  Returns:
    The thought, or None; and the other messages. Where none of these is a call, they
    are given as plain text.
  """
  parts = _split(text)
  thoughts = [part.body for part in parts if _is_thought(part)]
  rest = ''.join(part.raw for part in parts if not _is_thought(part))
  content, calls = _scan(rest, ())
  return '\n'.join(thoughts) if thoughts else None, rest if calls else content


def _is_thought(part: _Part) -> bool:
  return part.channel == 'analysis' and not part.recipient


def _write(calls: Sequence[ToolCall]) -> str:
  return '<|start|>assistant'.join(
    f'<|channel|>commentary to=functions.{call["name"]} <|constrain|>json<|message|>'
    f'{dump_json(call["arguments"])}<|call|>'
    for call in calls
  )


HARMONY = ToolFormat(
  'GPT-OSS (harmony)',
  _scan,
  _write,
  markers=('<|channel|>', '<|start|>', ' to=functions.'),
  ends=('<|call|>',),
)
