"""Anthropic requests: bodies of `/v1/messages` become chat requests.

A message of Anthropic's API may hold the results of several tools, which are messages
of their own in the chat API.
"""

import dataclasses
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

API_VERSIONS = ('2023-06-01', '2026-10-21')  # what is read here is the same in both
READ_FIELDS = frozenset(
  (
    *('max_tokens', 'messages', 'output_config', 'return_token_ids', 'seed'),
    *('stop_sequences', 'stream', 'system', 'temperature', 'thinking', 'tool_choice'),
    *('chat_template_kwargs', 'tools', 'top_k', 'top_p'),
  )
)
# Fields that would change the reply, with the values that leave it as it is.
NEUTRAL_FIELDS: dict[str, tuple[Any, ...]] = {
  'billing_policy': (),
  'compaction': (),
  'container': (),
  'context_management': ({},),
  'fallback_credit_token': (),
  'fallbacks': ([],),
  'mcp_servers': ([],),
  'output_format': (),
  'speed': ('standard',),
  'thread': (),
}
IDLE_FIELDS = frozenset(
  (
    *('betas', 'cache_control', 'diagnostics', 'inference_geo', 'metadata', 'model'),
    *('service_tier', 'user_profile_id', 'workspace_id'),
  )
)
# Names of fields in the chat API's errors.
_NAMES = {
  'stop': 'stop_sequences',
  'reasoning_effort': 'output_config.effort',
  'response_format': 'output_config.format',
  'parallel_tool_calls': 'tool_choice.disable_parallel_tool_use',
}
_ERROR_TYPES = {
  400: 'invalid_request_error',
  401: 'authentication_error',
  403: 'permission_error',
  404: 'not_found_error',
  408: 'timeout_error',
  409: 'conflict_error',
  413: 'request_too_large',
  429: 'rate_limit_error',
  503: 'overloaded_error',
}
ERROR_MARK = 'Error: '  # before the content of a tool result with is_error
_CHOICES = {'auto': 'auto', 'none': 'none', 'any': 'required'}


class _Text(BodyPart, tag='text'):
  text: str
  cache_control: Any = None
  citations: Any = None


class _Base64Source(BodyPart, tag='base64'):
  media_type: Literal['image/png', 'image/jpeg', 'image/gif', 'image/webp']
  data: str


class _Transformations(BodyPart):
  oversized_image: Literal['downsize'] | None = None


class _Image(BodyPart, tag='image'):
  source: _Base64Source
  cache_control: Any = None
  transformations: _Transformations | None = None


class _Thinking(BodyPart, tag='thinking'):
  thinking: str
  signature: Any = None


class _ToolUse(BodyPart, tag='tool_use'):
  id: str
  name: str
  input: JsonObject
  cache_control: Any = None
  caller: Any = None
  toolset_name: None = None


class _ToolResult(BodyPart, tag='tool_result'):
  tool_use_id: str
  content: str | list[_Text | _Image] | None = None
  is_error: bool | None = None
  cache_control: Any = None
  toolset_name: None = None


class _Entry(BodyPart):
  role: Literal['user', 'assistant', 'system']
  content: str | list[_Text | _Image | _Thinking | _ToolUse | _ToolResult]


class _Tool(BodyPart):
  name: str
  input_schema: JsonObject
  description: str | None = None
  type: Literal['custom'] | None = None
  allowed_callers: list[Literal['direct']] | None = None
  cache_control: Any = None
  defer_loading: bool | None = None
  eager_input_streaming: Any = None
  input_examples: Annotated[list[Any], Meta(max_length=0)] | None = None
  strict: Any = None


class _ToolChoice(BodyPart):
  type: Literal['auto', 'any', 'none', 'tool']
  name: str | None = None
  disable_parallel_tool_use: bool | None = None


class _ThinkingOptions(BodyPart):
  type: Literal['enabled', 'disabled', 'adaptive']
  block_binding: None = None
  budget_tokens: Annotated[int, Meta(ge=1)] | None = None
  display: Literal['summarized'] | None = None


class _OutputFormat(BodyPart):
  type: Literal['json_schema']
  schema: JsonObject


class _OutputOptions(BodyPart):
  effort: str | None = None
  format: _OutputFormat | None = None
  task_budget: None = None


class MessagesBody(msgspec.Struct):
  """Describes the fields of a request that are read, as Anthropic names them."""

  max_tokens: Annotated[int, Meta(ge=1, le=2**31)]
  messages: list[Any]
  system: str | list[_Text] | None = None
  temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
  top_p: Annotated[float, Meta(ge=1e-6, le=1)] | None = None
  top_k: Annotated[int, Meta(ge=0, le=2**31)] | None = None
  stop_sequences: list[str] | None = None
  stream: bool | None = None
  tools: list[_Tool] | None = None
  tool_choice: _ToolChoice | None = None
  thinking: _ThinkingOptions | None = None
  output_config: _OutputOptions | None = None


def parse_messages(data: bytes, cache: RequestCache | None) -> GenerationRequest:
  """Parses a request to /v1/messages.

  Args:
    data: The body.
    cache: The session's earlier requests; the request is added. None parses all of it.

  Returns:
    The request.

  Raises:
    ApiError: Names the field at fault.
  """
  body = typed_bodies.read_entries(
    data, cache, _parse_entries, field='messages', form='messages'
  )
  check_fields(body, READ_FIELDS, NEUTRAL_FIELDS, IDLE_FIELDS)
  fields = typed_bodies.check_model(body, MessagesBody)
  messages = [message for entry in fields.messages for message in entry]
  if not messages:
    raise invalid_field('messages', 'at least one message is needed')
  if messages[-1]['role'] == 'assistant':
    raise invalid_field(
      'messages',
      "the last one is the assistant's: replies that are begun cannot be continued",
      'unsupported_value',
    )
  if system := fields.system:
    text = system if isinstance(system, str) else ''.join(one.text for one in system)
    messages = [{'role': 'system', 'content': text}, *messages]
  try:
    request = parse_chat(_chat_body(body, fields), messages)
  except ApiError as error:
    raise typed_bodies.rename_field(error, _NAMES) from error
  thinking = fields.thinking.type if fields.thinking else 'adaptive'
  budget = fields.thinking.budget_tokens if fields.thinking else None
  if thinking == 'enabled' and budget is not None and budget < fields.max_tokens:
    raise invalid_field(
      'thinking.budget_tokens',
      'a thought cannot be ended early: leave it out, and limit the whole reply by '
      'max_tokens',
      'unsupported_value',
    )
  return dataclasses.replace(
    request,
    api='messages',
    thinking=None if thinking == 'adaptive' else thinking == 'enabled',
  )


def error_body(error: ApiError) -> JsonObject:
  """Formats an error as Anthropic's clients expect it.

  Args:
    error: The error.

  Returns:
    The response: {'type': 'error', 'error': {'type', 'message'}}.
  """
  default = 'api_error' if error.status >= 500 else 'invalid_request_error'
  kind = _ERROR_TYPES.get(error.status, default)
  fields: dict[str, Any] = {'type': kind, 'message': str(error)}
  if error.param == 'thread':  # clients then send whole conversations
    unsupported = {
      'error_code': 'thread_unsupported_request',
      'unsupported': ['thread'],
    }
    fields['details'] = unsupported
  return {'type': 'error', 'error': fields}


def check_version(version: str | None) -> None:
  """Raises ApiError for a version of Anthropic's API that is not served.

  Args:
    version: The header `anthropic-version`; None if there is none.

  Raises:
    ApiError: If another version is wanted.
  """
  if version is not None and version not in API_VERSIONS:
    known = ' or '.join(API_VERSIONS)
    message = f'anthropic-version: {version[:40]!r} is not supported; use {known}'
    raise ApiError(400, message)


def _chat_body(body: JsonObject, fields: MessagesBody) -> JsonObject:
  """Returns the same request for the chat API, without its messages."""
  names = ('chat_template_kwargs', 'return_token_ids', 'seed', 'stream', 'temperature')
  chat = {name: body[name] for name in (*names, 'top_k', 'top_p') if name in body}
  choice, config = fields.tool_choice, fields.output_config
  if choice is not None:
    named = {'type': 'function', 'function': {'name': choice.name}}
    chat['tool_choice'] = _CHOICES.get(choice.type, named)
    chat['parallel_tool_calls'] = not choice.disable_parallel_tool_use
  if config is not None and config.format is not None:
    schema = {'schema': config.format.schema}
    chat['response_format'] = {'type': 'json_schema', 'json_schema': schema}
  return {
    **chat,
    'messages': [],
    'max_tokens': fields.max_tokens,
    'stop': fields.stop_sequences,
    'tools': [_tool(one, i) for i, one in enumerate(fields.tools or [])],
    'reasoning_effort': config and config.effort,
  }


def _tool(tool: _Tool, index: int) -> JsonObject:
  if tool.defer_loading:
    raise invalid_field(
      f'tools[{index}].defer_loading', 'all tools are loaded', 'unsupported_value'
    )
  function = {'name': tool.name, 'parameters': tool.input_schema}
  if tool.description is not None:
    function['description'] = tool.description
  return {'type': 'function', 'function': function}


# ---- messages


def _parse_entries(entries: list[Any]) -> list[list[Message]]:
  return [_parse_entry(entry, f'messages[{i}]') for i, entry in enumerate(entries)]


def _parse_entry(value: object, place: str) -> list[Message]:
  """Returns the messages of the chat API that one message stands for."""
  entry = typed_bodies.check_model(value, _Entry, place)
  blocks = entry.content
  if isinstance(blocks, str):
    blocks = [_Text(blocks)]
  allowed = {
    'assistant': (_Text, _Thinking, _ToolUse),
    'user': (_Text, _Image, _ToolResult),
    'system': (_Text,),
  }[entry.role]
  for block in blocks:
    if not isinstance(block, allowed):
      kind = block.__struct_config__.tag
      raise invalid_field(f'{place}.content', f'{kind} is not for the {entry.role}')
  if entry.role == 'assistant':
    return typed_bodies.to_messages([_reply(blocks)], place)
  results = [block for block in blocks if isinstance(block, _ToolResult)]
  others = blocks[len(results) :]
  if any(isinstance(block, _ToolResult) for block in others):
    raise invalid_field(f'{place}.content', 'tool_result must come before other blocks')
  messages = [
    {'role': 'tool', 'tool_call_id': one.tool_use_id, 'content': _result_content(one)}
    for one in results
  ]
  if others or not results:
    messages.append({'role': entry.role, 'content': _parts(others)})
  return typed_bodies.to_messages(messages, place)


def _reply(blocks: list[Any]) -> JsonObject:
  """Returns a reply in the form of the chat API."""
  calls = [
    {
      'id': block.id,
      'type': 'function',
      'function': {'name': block.name, 'arguments': block.input},
    }
    for block in blocks
    if isinstance(block, _ToolUse)
  ]
  thoughts = [block.thinking for block in blocks if isinstance(block, _Thinking)]
  texts = [block.text for block in blocks if isinstance(block, _Text)]
  return {
    'role': 'assistant',
    'content': ''.join(texts),
    'reasoning_content': '\n'.join(thoughts),
    'tool_calls': calls,
  }


def _result_content(result: _ToolResult) -> Any:
  """Returns what the model reads; no chat template has a field that says it failed."""
  content = result.content
  if not result.is_error:
    return _parts(content)
  if content is None or isinstance(content, str):
    return f'{ERROR_MARK}{content or ""}'
  return _parts([_Text(ERROR_MARK), *content])


def _parts(content: Any) -> Any:
  """Returns a content in the form of the chat API."""
  if content is None or isinstance(content, str):
    return content or ''
  return [
    {'type': 'text', 'text': block.text}
    if isinstance(block, _Text)
    else {
      'type': 'image_url',
      'image_url': {
        'url': f'data:{block.source.media_type};base64,{block.source.data}'
      },
    }
    for block in content
  ]
