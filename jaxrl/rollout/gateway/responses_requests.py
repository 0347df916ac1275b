"""Responses requests: bodies of OpenAI's `/v1/responses` become chat requests.

What a reply is made of are several items here: its thought, its text and each of its
calls. They are put together again, so that the conversation is that of the chat API.
"""

import base64
import binascii
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from jaxrl.options import JsonObject
from jaxrl.rollout.gateway import typed_bodies
from jaxrl.rollout.gateway.generation_request import (
  ApiError,
  GenerationRequest,
  invalid_field,
)
from jaxrl.rollout.gateway.openai_requests import check_fields, parse_chat
from jaxrl.rollout.gateway.request_cache import RequestCache
from jaxrl.rollout.gateway.typed_bodies import BodyPart
from jaxrl.types import Message

READ_FIELDS = frozenset(
  (
    *('chat_template_kwargs', 'include', 'input', 'instructions', 'max_output_tokens'),
    *('parallel_tool_calls', 'previous_response_id', 'prompt_cache_options'),
    *('reasoning', 'return_token_ids', 'seed', 'stop', 'stream', 'stream_options'),
    *('temperature', 'text', 'tool_choice', 'tools', 'top_k', 'top_logprobs', 'top_p'),
  )
)
# Fields that would change the reply, with the values that leave it as it is.
NEUTRAL_FIELDS: dict[str, tuple[Any, ...]] = {
  'background': (False,),
  'background_options': ({},),
  'context_management': ([],),
  'conversation': (),
  'image': ({},),
  'moderation': (),
  'prompt': (),
  'truncation': ('disabled',),
}
IDLE_FIELDS = frozenset(
  (
    *('access_programs', 'max_tool_calls', 'metadata', 'model', 'prompt_cache_key'),
    *('prompt_cache_retention', 'safety_identifier', 'service_tier', 'store', 'user'),
  )
)
# Names of fields in the chat API's errors.
_NAMES = {
  'max_tokens': 'max_output_tokens',
  'messages': 'input',
  'reasoning_effort': 'reasoning.effort',
  'response_format': 'text.format',
}
ECHOED_FIELDS = (
  *('instructions', 'max_output_tokens', 'metadata', 'previous_response_id'),
  *('reasoning', 'temperature', 'text', 'tool_choice', 'tools', 'top_logprobs'),
  *('top_p', 'user'),
)
_LOGPROBS = 'message.output_text.logprobs'
_ENCRYPTED = 'reasoning.encrypted_content'
# What else a request may want to be included is of tools that OpenAI runs.
_Include = Literal[
  'code_interpreter_call.outputs',
  'computer_call_output.output.image_url',
  'file_search_call.results',
  'message.input_image.image_url',
  'message.output_text.logprobs',
  'reasoning.encrypted_content',
  'web_search_call.action.sources',
  'web_search_call.results',
]
# The ids that this endpoint gives to the items of one reply.
_ITEM_ID = re.compile(r'(?:rs|msg|fc)_([0-9a-f]{12}-\d+)(?:_\d+)?')


class _Text(BodyPart, tag='input_text'):
  text: str
  prompt_cache_breakpoint: Any = None


class _OutputText(BodyPart, tag='output_text'):
  text: str
  annotations: Any = None
  logprobs: Any = None


class _Image(BodyPart, tag='input_image'):
  image_url: str
  detail: Any = None
  file_id: None = None
  prompt_cache_breakpoint: Any = None


_Content = str | list[_Text | _OutputText | _Image]


class _MessageItem(BodyPart, tag='message'):
  role: Literal['user', 'assistant', 'system', 'developer']
  content: _Content
  id: str | None = None
  phase: Any = None
  status: Any = None


class _CallItem(BodyPart, tag='function_call'):
  call_id: str
  name: str
  arguments: str
  id: str | None = None
  caller: Any = None
  is_async: Any = msgspec.field(default=None, name='async')
  namespace: None = None
  status: Any = None


class _OutputItem(BodyPart, tag='function_call_output'):
  call_id: str
  output: _Content
  id: Any = None
  caller: Any = None
  status: Any = None


class _ThoughtText(BodyPart):
  text: str
  type: Any = None


class _ReasoningItem(BodyPart, tag='reasoning'):
  content: list[_ThoughtText] | None = None
  summary: list[_ThoughtText] | None = None
  encrypted_content: str | None = None
  id: str | None = None
  status: Any = None


_Item = _MessageItem | _CallItem | _OutputItem | _ReasoningItem


class _FunctionTool(BodyPart, tag='function'):
  name: str
  parameters: JsonObject | None = None
  description: str | None = None
  strict: Any = None
  allowed_callers: list[Literal['direct']] | None = None
  defer_loading: bool | None = None
  is_async: bool | None = msgspec.field(default=None, name='async')
  output_schema: None = None

  def __post_init__(self) -> None:
    if self.defer_loading:
      self.refuse('defer_loading')
    if self.is_async:
      self.refuse('async')


class _ToolChoice(BodyPart):
  type: Literal['function']
  name: str


class _Reasoning(BodyPart):
  effort: str | None = None
  context: Literal['auto'] | None = None
  generate_summary: Literal['auto'] | None = None
  mode: Literal['standard'] | None = None
  summary: Literal['auto'] | None = None


class _TextFormat(BodyPart):
  type: Literal['text', 'json_object', 'json_schema']
  schema: JsonObject | None = None
  description: Any = None
  name: Any = None
  strict: Any = None


class _TextOptions(BodyPart):
  format: _TextFormat | None = None
  verbosity: Literal['medium'] | None = None


class _StreamOptions(BodyPart):
  include_obfuscation: bool | None = None


class _CacheOptions(BodyPart):
  prewarm: bool | None = None
  comparison_response_id: Any = None
  mode: Any = None
  ttl: Any = None

  def __post_init__(self) -> None:
    if self.prewarm:
      self.refuse('prewarm')


class ResponsesBody(msgspec.Struct):
  """Describes the fields of a request that are read, as OpenAI names them."""

  input: Any = ''
  instructions: str | None = None
  previous_response_id: str | None = None
  max_output_tokens: Annotated[int, Meta(ge=1, le=2**31)] | None = None
  temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
  top_p: Annotated[float, Meta(ge=1e-6, le=1)] | None = None
  top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
  stream: bool | None = None
  stream_options: _StreamOptions | None = None
  parallel_tool_calls: bool | None = None
  tools: list[_FunctionTool] | None = None
  tool_choice: str | _ToolChoice | None = None
  reasoning: _Reasoning | None = None
  text: _TextOptions | None = None
  include: list[_Include] | None = None
  metadata: dict[str, str] | None = None
  prompt_cache_options: _CacheOptions | None = None


@dataclasses.dataclass(frozen=True)
class _Piece:
  """A message, or a piece of a reply.

  Attributes:
    message: The message; None for a piece of a reply.
    key: The reply's key, if the item has an id of this endpoint.
    fields: The fields of the reply's message that the piece fills.
  """

  message: Message | None = None
  key: str = ''
  fields: JsonObject = dataclasses.field(default_factory=dict)


def parse_responses(
  data: bytes,
  cache: RequestCache | None,
  find_conversation: Callable[[str], list[Message]],
) -> GenerationRequest:
  """Parses a request to /v1/responses.

  Args:
    data: The body.
    cache: The session's earlier requests; the request is added. None parses all of it.
    find_conversation: Returns the messages up to the end of an earlier response, given
      its id.

  Returns:
    The request.

  Raises:
    ApiError: Names the field at fault.
  """
  body = typed_bodies.read_entries(
    data, cache, _parse_items, field='input', form='responses'
  )
  check_fields(body, READ_FIELDS, NEUTRAL_FIELDS, IDLE_FIELDS)
  fields = typed_bodies.check_model(body, ResponsesBody)
  messages = _conversation(fields, find_conversation)
  include = fields.include or []
  try:
    request = parse_chat(_chat_body(body, fields), messages)
  except ApiError as error:
    raise typed_bodies.rename_field(error, _NAMES) from error
  return dataclasses.replace(
    request,
    api='responses',
    logprobs=_LOGPROBS in include or bool(fields.top_logprobs),
    has_instructions=bool(fields.instructions),
    echo={key: body[key] for key in ECHOED_FIELDS if body.get(key) is not None},
    encrypts_thoughts=_ENCRYPTED in include,
  )


def encrypt_thought(thought: str) -> str:
  """Writes a thought as the encrypted content that a client sends back unread.

  Nothing is hidden by it: the client has the thought in plain text, too.

  Args:
    thought: The thought.

  Returns:
    Its encoding.
  """
  return base64.b64encode(thought.encode()).decode()


def _conversation(
  fields: ResponsesBody, find_conversation: Callable[[str], list[Message]]
) -> list[Message]:
  """Returns the whole conversation that a request means."""
  messages: list[Message] = []
  if fields.instructions:
    messages.append({'role': 'system', 'content': fields.instructions})
  if fields.previous_response_id is not None:
    messages += find_conversation(fields.previous_response_id)
  if isinstance(fields.input, str):
    if fields.input:
      messages.append({'role': 'user', 'content': fields.input})
  elif isinstance(fields.input, list):
    messages += _join_replies(fields.input)
  else:
    raise invalid_field('input', 'a text or a list of items is needed')
  if len(messages) == bool(fields.instructions):
    raise invalid_field(
      'input', 'a text or a list of items is needed', 'missing_required_parameter'
    )
  return messages


def _chat_body(body: JsonObject, fields: ResponsesBody) -> JsonObject:
  """Returns the same request for the chat API, without its messages."""
  names = ('chat_template_kwargs', 'return_token_ids', 'seed', 'stop', 'stream')
  more = ('temperature', 'top_p', 'top_k', 'parallel_tool_calls', 'top_logprobs')
  chat = {name: body[name] for name in (*names, *more) if name in body}
  if fields.top_logprobs:
    chat['logprobs'] = True
  choice: Any = fields.tool_choice
  if isinstance(choice, _ToolChoice):
    choice = {'type': 'function', 'function': {'name': choice.name}}
  return {
    **chat,
    'messages': [],
    'max_tokens': fields.max_output_tokens,
    'tools': [_tool(one) for one in fields.tools or []],
    'tool_choice': choice,
    'reasoning_effort': fields.reasoning and fields.reasoning.effort,
    'response_format': fields.text and _response_format(fields.text.format),
  }


def _tool(tool: _FunctionTool) -> JsonObject:
  function: JsonObject = {'name': tool.name}
  if tool.parameters is not None:
    function['parameters'] = tool.parameters
  if tool.description is not None:
    function['description'] = tool.description
  return {'type': 'function', 'function': function}


def _response_format(given: _TextFormat | None) -> JsonObject | None:
  """Returns a text format in the form of the chat API."""
  if given is None or given.type != 'json_schema':
    return given and {'type': given.type}
  return {'type': 'json_schema', 'json_schema': {'schema': given.schema}}


# ---- items


def _parse_items(items: list[Any]) -> list[_Piece]:
  return [_parse_item(item, f'input[{i}]') for i, item in enumerate(items)]


def _parse_item(item: object, place: str) -> _Piece:
  if isinstance(item, dict) and 'type' not in item:
    item = {**item, 'type': 'message'}
  one: Any = typed_bodies.check_model(item, _Item, place)  # type: ignore[arg-type]
  if isinstance(one, _OutputItem):
    content = _parts(one.output)
    tool = {'role': 'tool', 'tool_call_id': one.call_id, 'content': content}
    return _Piece(typed_bodies.to_messages([tool], place)[0])
  if isinstance(one, _MessageItem) and one.role != 'assistant':
    said = {'role': one.role, 'content': _parts(one.content)}
    return _Piece(typed_bodies.to_messages([said], place)[0])
  found = _ITEM_ID.fullmatch(one.id or '')
  return _Piece(None, found[1] if found else '', _reply_fields(one))


def _reply_fields(item: Any) -> JsonObject:
  """Returns what an item says of a reply."""
  if isinstance(item, _MessageItem):
    content = item.content
    if isinstance(content, list):
      content = ''.join(getattr(part, 'text', '') for part in content)
    return {'content': content}
  if isinstance(item, _CallItem):
    function = {'name': item.name, 'arguments': item.arguments}
    call = {'id': item.call_id, 'type': 'function', 'function': function}
    return {'tool_calls': [call]}
  if item.content is None and item.encrypted_content:
    try:
      decoded = base64.b64decode(item.encrypted_content, validate=True)
      return {'reasoning_content': decoded.decode()}
    except (binascii.Error, ValueError):
      pass  # another endpoint's, which nobody else can read
  texts = [part.text for part in item.content or item.summary or ()]
  return {'reasoning_content': '\n'.join(texts)}


def _parts(content: Any) -> Any:
  """Returns a content in the form of the chat API."""
  if isinstance(content, str):
    return content
  return [
    {'type': 'image_url', 'image_url': {'url': part.image_url}}
    if isinstance(part, _Image)
    else {'type': 'text', 'text': part.text}
    for part in content
  ]


def _join_replies(pieces: Sequence[_Piece]) -> list[Message]:
  """Returns the messages; pieces of one reply become one of them."""
  messages: list[Message] = []
  fields: JsonObject = {}
  key = ''

  def end_reply() -> None:
    if fields:
      reply = {'role': 'assistant', 'content': '', **fields}
      messages.extend(typed_bodies.to_messages([reply], 'input'))
      fields.clear()

  for piece in pieces:
    if piece.message is not None:
      end_reply()
      messages.append(piece.message)
      continue
    if fields and _begins_reply(fields, key, piece):
      end_reply()
    key = piece.key if not fields else key or piece.key
    for name, value in piece.fields.items():
      fields[name] = fields[name] + value if name in fields else value
  end_reply()
  return messages


def _begins_reply(fields: JsonObject, key: str, piece: _Piece) -> bool:
  """Returns whether a piece belongs to another reply than those before it."""
  if key and piece.key:
    return key != piece.key
  if 'reasoning_content' in piece.fields:
    return True
  return 'content' in piece.fields and ('content' in fields or 'tool_calls' in fields)
