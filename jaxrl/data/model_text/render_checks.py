"""What a chat template makes of a message is checked: it may lose and change nothing.

Each text of a message is replaced by a mark, and the message is rendered again. The
template has written all of it if every mark is there, and if the texts in the place of
their marks give the first rendering. Spaces around a text may differ: templates trim.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl.data.model_text.chat_template import THOUGHT_KEYS, read_call_arguments
from jaxrl.types import Message

TEXT, THOUGHT, CALLS = 'its text', 'its thought', 'its tool calls'
# Templates look for these in a text, so that they are kept.
_THOUGHT_TAGS = re.compile(r'(</?(?:seed:)?think>|\[/?THINK\])')


class _Marks:
  """Marks that stand for texts, in the order in which they were made."""

  def __init__(self, taken: str):
    """Chooses marks that do not occur in a text.

    Args:
      taken: The text.
    """
    self._end = 'kM'
    while self._end in taken:
      self._end = f'k{self._end}'
    self.texts: dict[str, str] = {}  # by mark
    self.parts: dict[str, str] = {}  # which part of a message each belongs to
    self.values: set[str] = set()  # those whose texts may be written with escapes

  def put(self, text: str, part: str, *, is_value: bool = False) -> str:
    """Returns a mark in the place of a text; a text without letters stays."""
    if not text.strip():
      return text
    if part == THOUGHT:  # stands under several keys
      for mark, known in self.texts.items():
        if known == text and self.parts[mark] == part:
          return mark
    mark = f'Mk{len(self.texts)}{self._end}'
    self.texts[mark], self.parts[mark] = text, part
    if is_value:
      self.values.add(mark)
    return mark

  def missing(self, text: str) -> tuple[str, str] | None:
    """Returns the part and the text of the first mark that a text does not have."""
    for mark, part in self.parts.items():
      if mark not in text:
        return part, self.texts[mark]
    return None

  def gives(self, marked: str, text: str, *, any_value: bool = False) -> bool:
    """Returns whether a text is a marked one with the texts in place of the marks."""
    if not self.texts:
      return marked == text
    pieces = re.split(f'({"|".join(self.texts)})', marked)
    ends, is_any = {0}, False  # where a piece may end; whether anything may follow it
    for i, piece in enumerate(pieces):
      if i % 2 and any_value and piece in self.values:
        is_any = True
        continue
      if i % 2:
        whole = self.texts[piece]
        forms = _written_forms(whole) if piece in self.values else [whole.strip()]
      else:
        start = piece if i == 0 else piece.lstrip()
        forms = [start if i == len(pieces) - 1 else start.rstrip()]
      if i:
        ends = {len(text) - len(text[end:].lstrip()) for end in ends}
      if is_any and i == len(pieces) - 1:
        return min(ends) <= len(text) - len(forms[0]) and text.endswith(forms[0])
      if is_any and forms[0]:
        ends, is_any = _ends_within(text, min(ends), forms), False
      elif not is_any:
        ends = {
          end + len(form)
          for end in ends
          for form in forms
          if text.startswith(form, end)
        }
      if not ends:
        return False
    return len(text) in ends


def _ends_within(text: str, start: int, forms: Sequence[str]) -> set[int]:
  """Returns where any of the forms may end in a text, from an index on."""
  pattern = '|'.join(map(re.escape, forms))
  return {match.end() for match in re.compile(pattern).finditer(text, start)}


def _written_forms(text: str) -> list[str]:
  """Returns the ways to write a text, with and without escapes."""
  as_json = [json.dumps(text, ensure_ascii=ascii)[1:-1] for ascii in (False, True)]
  twice = [json.dumps(form, ensure_ascii=False)[1:-1] for form in as_json]
  return list(dict.fromkeys(form.strip() for form in (text, *as_json, *twice)))


def check_reply(
  message: Message,
  whole: str,
  render: Callable[[Message], str],
  reads_calls: Callable[[], bool],
) -> None:
  """Checks that a template has written all of a reply.

  Args:
    message: The reply.
    whole: What the template made of it.
    render: Renders a reply in the place of this one.
    reads_calls: Says whether the calls can be read again from what was written.

  Raises:
    ValueError: If the template leaves out or changes a part of the reply.
  """
  functions = [call.get('function') or call for call in message.get('tool_calls') or ()]
  for are_names_marked in (True, False):
    marks = _Marks(f'{message}{whole}')
    again = render(_with_marks(message, marks, are_names_marked))
    missing = marks.missing(again)
    if missing is None and not are_names_marked:
      names = [str(function['name']) for function in functions]
      missing = next(((CALLS, name) for name in names if name not in whole), None)
    if missing is None and (
      marks.gives(again, whole)
      or (functions and marks.gives(again, whole, any_value=True) and reads_calls())
    ):
      break
    if not functions or not are_names_marked:  # some names are written otherwise
      raise _lost(*missing) if missing else _changed(marks, whole)
  _check_values(message, whole, render)


def _with_marks(message: Message, marks: _Marks, are_names_marked: bool) -> Message:
  marked = dict(message)
  marked['content'] = _mark_content(message.get('content'), marks)
  for key in THOUGHT_KEYS:
    if isinstance(thought := message.get(key), str):
      marked[key] = marks.put(thought, THOUGHT)
  if message.get('tool_calls'):
    marked['tool_calls'] = [
      _mark_call(call, marks, are_names_marked) for call in message['tool_calls']
    ]
  return marked


def _mark_content(content: object, marks: _Marks, *, is_value: bool = False) -> Any:
  if isinstance(content, str):
    parts = _THOUGHT_TAGS.split(content)
    return ''.join(
      part if i % 2 else marks.put(part, TEXT, is_value=is_value)
      for i, part in enumerate(parts)
    )
  if isinstance(content, list):
    return [
      {**part, 'text': _mark_content(part['text'], marks, is_value=is_value)}
      if isinstance(part, Mapping) and isinstance(part.get('text'), str)
      else part
      for part in content
    ]
  return content


def _mark_call(call: Message, marks: _Marks, is_name_marked: bool) -> Message:
  function, outer = dict(call.get('function') or call), {}
  if is_name_marked:
    name = str(function['name'])
    function['name'] = marks.put(name, CALLS)
    if name in str(call.get('id') or ''):  # which some templates write in its place
      outer = {'id': str(call['id']).replace(name, function['name'])}
  function['arguments'] = _map_values(
    read_call_arguments(function),
    lambda value: (
      marks.put(value, CALLS, is_value=True) if isinstance(value, str) else value
    ),
  )
  if 'function' in call:
    return {**call, **outer, 'function': function}
  return {**function, **outer}


def _map_values(
  value: object, change: Callable[[Any], Any], change_key: Callable[[str], str] = str
) -> Any:
  """Changes each value in objects and lists, and perhaps each key."""
  if isinstance(value, Mapping):
    return {
      change_key(key): _map_values(one, change, change_key)
      for key, one in value.items()
    }
  if isinstance(value, list | tuple):
    return [_map_values(one, change, change_key) for one in value]
  return change(value)


def _check_values(
  message: Message, whole: str, render: Callable[[Message], str]
) -> None:
  """Checks that no key and no number of a call is left out."""
  marks = _Marks(f'{message}{whole}')
  calls = []
  for call in message.get('tool_calls') or ():
    function = dict(call.get('function') or call)
    function['arguments'] = _map_values(
      read_call_arguments(function),
      lambda value: marks.put(f'{json.dumps(value)} ', CALLS),
      lambda key: marks.put(key, CALLS),
    )
    calls.append({**call, 'function': function} if 'function' in call else function)
  if calls and (missing := marks.missing(render({**message, 'tool_calls': calls}))):
    raise _lost(*missing)


def _lost(part: str, text: str) -> ValueError:
  return ValueError(
    f'the chat template leaves out {part}, {text.strip()[:60]!r}, so that the model '
    'would not learn it: use a template that writes it, or leave it out'
  )


def _changed(marks: _Marks, whole: str) -> ValueError:
  text = next(
    (text for text in marks.texts.values() if text.strip() not in whole),
    next(iter(marks.texts.values()), ''),
  )
  return ValueError(
    f'the chat template changes what a reply says, {text.strip()[:60]!r}, so that the '
    'model would learn something else: use a template that writes it as it is'
  )


def check_results(
  messages: Sequence[Message], text: str, render: Callable[[Sequence[Message]], str]
) -> None:
  """Checks that a template has written all that tools have returned.

  Args:
    messages: The messages after a reply.
    text: What the template made of them.
    render: Renders messages in the place of these.

  Raises:
    ValueError: If the template leaves out or changes a result.
  """
  if not any(message['role'] == 'tool' for message in messages):
    return
  marks = _Marks(f'{messages}{text}')
  marked = [
    {**message, 'content': _mark_content(message['content'], marks, is_value=True)}
    if message['role'] == 'tool' and message.get('content')
    else message
    for message in messages
  ]
  again = render(marked)
  verb = 'leaves out' if marks.missing(again) else 'changes'
  if verb == 'changes' and marks.gives(again, text):
    return
  raise ValueError(
    f'the chat template {verb} the results of tools, so that the model would not see '
    'them as they are: use a template that writes messages of the role tool'
  )
