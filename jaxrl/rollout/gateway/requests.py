"""What clients ask for: a body of JSON, checked field by field."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.data.messages import messages as normal
from jaxrl.data.sources import DataError
from jaxrl.rollout.gateway.errors import ApiError, wrong
from jaxrl.rollout.gateway.seen import Known, Seen
from jaxrl.types import Message

# Fields that would change the reply, with what leaves it as it is.
NEUTRAL: dict[str, tuple[Any, ...]] = {
  'audio': (),
  'best_of': (1,),
  'echo': (False,),
  'frequency_penalty': (0,),
  'function_call': ('none',),
  'functions': ([],),
  'logit_bias': ({},),
  'min_p': (0,),
  'modalities': (['text'],),
  'presence_penalty': (0,),
  'repetition_penalty': (1,),
  'response_format': ({'type': 'text'},),
  'suffix': ('',),
  'top_logprobs': (0,),
}


@dataclasses.dataclass(frozen=True)
class Ask:
  """One request, of messages (a chat) or of a prompt (a text, or ids as they stand).

  What is None is not said. usage: whether a stream ends in a count of tokens. ids:
  whether token ids are wanted too.
  """

  messages: list[Message] | None = None
  prompt: str | list[int] | None = None
  tools: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  n: int = 1
  stream: bool = False
  usage: bool = False
  logprobs: bool = False
  ids: bool = False
  max_tokens: int | None = None
  temperature: float | None = None
  top_p: float | None = None
  top_k: int | None = None
  stop: tuple[str, ...] = ()
  seed: int | None = None


def parse(data: bytes) -> dict[str, Any]:
  """The JSON object that a body holds. Raises ApiError."""
  return _object(data)[1]


def _object(
  data: bytes, seen: Seen | None = None
) -> tuple[str, dict[str, Any], Known | None]:
  """The body's text, its object, and what is known of it. Raises ApiError."""
  try:
    text = data.decode('utf-8-sig')
    body, known = (seen or Seen()).read(text)
  except ValueError as error:
    raise ApiError(
      400, f'the body is not JSON: {error}', code='invalid_json'
    ) from error
  if not isinstance(body, dict):
    raise ApiError(400, 'the body must be a JSON object', code='invalid_json')
  return text, body, known


def read_chat(data: bytes, seen: Seen) -> Ask:
  """`chat` of a body, of which what was `seen` before is not looked at again."""
  text, body, known = _object(data, seen)
  try:
    ask = chat(body, known.messages if known else ())
  except ApiError:
    if known is None:
      raise
    return chat(parse(data))  # so that what it says of messages has their own numbers
  assert ask.messages is not None
  seen.keep(text, known, ask.messages)
  return ask


def chat(body: Mapping[str, Any], known: Sequence[Message] = ()) -> Ask:
  """A request to /v1/chat/completions. Raises ApiError naming the field at fault.

  known: messages before the body's own.
  """
  if not isinstance(body.get('messages'), list):
    raise wrong(
      'messages', 'a list of messages is needed', 'missing_required_parameter'
    )
  choice = body.get('tool_choice')
  if choice not in (None, 'auto', 'none'):
    raise wrong('tool_choice', "only 'auto' and 'none' can be had", 'unsupported_value')
  tools = [] if choice == 'none' else body.get('tools') or []
  if not isinstance(tools, list) or not all(map(_is_tool, tools)):
    raise wrong('tools', "a list of {'type': 'function', 'function': {'name': …}}")
  logprobs = _flag(body, 'logprobs')
  new = body['messages']
  made = [*known, *(messages(new) if new or not known else ())]
  return Ask(messages=made, tools=tools, logprobs=logprobs, **_shared(body))


def completion(body: Mapping[str, Any]) -> Ask:
  """A request to /v1/completions. Raises ApiError naming the field at fault."""
  prompt = body.get('prompt')
  if isinstance(prompt, list) and len(prompt) == 1 and not _are_ids(prompt):
    (prompt,) = prompt
  if not _are_ids(prompt) and not (isinstance(prompt, str) and prompt):
    raise wrong('prompt', 'one text or one list of token ids is needed')
  logprobs = body.get('logprobs')
  if logprobs not in (None, 0, 1):
    raise wrong('logprobs', 'no more than that of the token drawn', 'unsupported_value')
  return Ask(prompt=prompt, logprobs=logprobs is not None, **_shared(body))


def messages(value: list[Any]) -> list[Message]:
  """Messages in one form, whoever wrote them. Raises ApiError."""
  try:
    made = normal(value)
  except (DataError, TypeError, AttributeError) as error:
    raise wrong('messages', str(error)) from error
  return [_same(message) for message in made]


def _same(message: Message) -> Message:
  """One form of what clients write in several: an empty list of calls, a new role."""
  kept = {k: v for k, v in message.items() if v or k == 'content'}
  return {**kept, 'role': 'system'} if kept['role'] == 'developer' else kept


def _shared(body: Mapping[str, Any]) -> dict[str, Any]:
  for name, neutral in NEUTRAL.items():
    if body.get(name) is not None and body[name] not in neutral:
      raise wrong(name, f'{body[name]!r} cannot be had here'[:200], 'unsupported_value')
  limit = 'max_completion_tokens'
  limit = limit if body.get(limit) is not None else 'max_tokens'
  stop = body.get('stop') or ()
  stop = (stop,) if isinstance(stop, str) else stop
  if not isinstance(stop, list | tuple) or not all(
    isinstance(s, str) and s for s in stop
  ):
    raise wrong('stop', 'one text, or a list of them, none empty')
  if len(stop) > 16 or any(len(s) > 256 for s in stop):
    raise wrong('stop', 'at most 16 texts of at most 256 letters')
  stream = body.get('stream_options') or {}
  if not isinstance(stream, dict):
    raise wrong('stream_options', 'an object is needed')
  return {
    'n': _number(body, 'n', int, 1, 128) or 1,
    'stream': _flag(body, 'stream'),
    'usage': _flag(stream, 'include_usage'),
    'ids': _flag(body, 'return_token_ids'),
    'max_tokens': _number(body, limit, int, 1, 2**31),
    'temperature': _number(body, 'temperature', float, 0, 100),
    'top_p': _number(body, 'top_p', float, 1e-6, 1),
    'top_k': _number(body, 'top_k', int, -1, 2**31),
    'stop': tuple(stop),
    'seed': _number(body, 'seed', int, -(2**63), 2**64),
  }


def number(value: Any, kind: type, low: float, high: float) -> bool:
  """Whether `value` is an int, or with kind float any finite number, within bounds."""
  if isinstance(value, bool) or not isinstance(value, (int, kind)):
    return False
  return math.isfinite(value) and low <= value <= high


def _number(
  body: Mapping[str, Any], name: str, kind: type, low: float, high: float
) -> Any:
  value = body.get(name)
  if value is not None and not number(value, kind, low, high):
    noun = 'a whole number' if kind is int else 'a number'
    raise wrong(name, f'{noun} from {low:g} to {high:g} is needed')
  return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
  value = body.get(name)
  if value not in (None, True, False):
    raise wrong(name, 'true or false is needed')
  return bool(value)


def _are_ids(value: Any) -> bool:
  """Whether it is a list of token ids. There may be many: none is looked at alone."""
  if not isinstance(value, list) or set(map(type, value)) != {int}:
    return False
  return min(value) >= 0 and max(value) < 2**31


def _is_tool(tool: Any) -> bool:
  function = tool.get('function') if isinstance(tool, dict) else None
  return isinstance(function, dict) and isinstance(function.get('name'), str)
