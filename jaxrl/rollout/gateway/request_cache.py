"""RequestCache recognizes messages that a client sends again, by their bytes.

A client sends the whole conversation with every turn. What a session has sent before is
neither parsed nor checked again, so that the cost of a turn is that of its new part.
"""

import codecs
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl.options import JsonObject

MAX_CACHED = 4  # conversations of one session that may alternate


class RequestCache:
  """Keeps the messages of a session's latest requests, as sent and as parsed."""

  def __init__(self) -> None:
    """Creates an empty cache."""
    self._requests: deque[dict[tuple[str, bytes], Any]] = deque(maxlen=MAX_CACHED)

  def read(
    self,
    data: bytes,
    parse_messages: Callable[[list[Any]], Sequence[object]],
    *,
    field: str = 'messages',
    form: str = 'chat',
  ) -> JsonObject:
    """Parses the body of a request, and keeps its messages.

    Args:
      data: The body.
      parse_messages: Parses the messages that are new, each to one object.
      field: The field that holds the messages.
      form: The API, as whose messages they are parsed.

    Returns:
      The body, with its messages parsed. One that was sent before is the same object.

    Raises:
      KeyError: If it has no messages.
      RecursionError: If it is nested too deeply.
      ValueError: If it is not a JSON object, or its messages are not a list.
    """
    import msgspec  # of the extra `serve`, which those who only import this may lack

    fields = _decode(data, dict[str, msgspec.Raw])
    entries = _decode(fields.pop(field), list[msgspec.Raw])
    body = {name: _decode(value) for name, value in fields.items()}
    sent = [(form, bytes(entry)) for entry in entries]
    known: dict[tuple[str, bytes], Any] = {}
    for one in self._requests:
      known |= one
    messages = {entry: known[entry] for entry in sent if entry in known}
    new = [entry for entry in dict.fromkeys(sent) if entry not in messages]
    if new or not sent:
      parsed = parse_messages([_decode(entry) for _, entry in new])
      messages |= zip(new, parsed, strict=True)
    # A request that continues an earlier one takes its place.
    others = (one for one in self._requests if not one.keys() <= messages.keys())
    self._requests = deque([*others, messages], MAX_CACHED)
    return body | {field: [messages[entry] for entry in sent]}


def parse_strict_json(data: bytes) -> Any:
  """Parses JSON strictly.

  Args:
    data: The JSON text, which may begin with a byte order mark.

  Returns:
    Its value.

  Raises:
    ValueError: If it is not JSON, nested too deeply, or has half of a surrogate pair.
  """
  try:
    return _decode(data.removeprefix(codecs.BOM_UTF8))
  except RecursionError as error:
    raise ValueError('it is nested too deeply') from error


def _decode(data: Any, kind: Any = Any) -> Any:
  """Parses JSON, as bytes or as a `msgspec.Raw`, into values of a type."""
  import msgspec

  try:
    return msgspec.json.decode(data, type=kind)
  except msgspec.MsgspecError as error:  # no ValueError before msgspec 0.20
    raise ValueError(str(error)) from error
