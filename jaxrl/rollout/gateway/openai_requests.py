"""OpenAI requests are JSON bodies that are checked field by field."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from jaxrl.data.chat_tokenizer import has_images
from jaxrl.data.model_text.chat_template import THOUGHT_KEYS
from jaxrl.data.row_sources import DataError
from jaxrl.data.rows import chat_messages
from jaxrl.options import JsonObject, Keywords, closest_match
from jaxrl.rollout.gateway.generation_request import (
  ApiError,
  GenerationRequest,
  invalid_field,
)
from jaxrl.rollout.gateway.request_cache import RequestCache, parse_strict_json
from jaxrl.types import Message

# Fields of OpenAI's API and of vLLM that would change the reply and are not supported,
# each with the values that leave the reply as it is.
NEUTRAL_FIELDS: dict[str, tuple[Any, ...]] = {
  'add_generation_prompt': (True,),
  'add_special_tokens': (False,),
  'allowed_token_ids': (),
  'audio': (),
  'bad_words': ([],),
  'best_of': (1,),
  'chat_template': ('',),
  'continue_final_message': (False,),
  'documents': ([],),
  'echo': (False,),
  'ec_transfer_params': ({},),
  'frequency_penalty': (0,),
  'function_call': ('none',),
  'functions': ([],),
  'guided_choice': (),
  'guided_decoding_backend': (),
  'guided_grammar': (),
  'guided_json': (),
  'guided_regex': (),
  'guided_whitespace_pattern': (),
  'ignore_eos': (False,),
  'include_reasoning': (True,),
  'include_stop_str_in_output': (False,),
  'kv_transfer_params': ({},),
  'length_penalty': (1,),
  'logit_bias': ({},),
  'logprob_token_ids': ([],),
  'media_io_kwargs': ({},),
  'min_p': (0,),
  'min_tokens': (0,),
  'mm_processor_kwargs': ({},),
  'modalities': (['text'],),
  'moderation': (),
  'presence_penalty': (0,),
  'prompt_embeds': (),
  'prompt_logprobs': (),
  'reasoning': (),
  'repetition_detection': (),
  'repetition_penalty': (1,),
  'return_mm_kwargs': (False,),
  'return_prompt_text': (False,),
  'return_token_offsets': (False,),
  'return_tokens_as_token_ids': (False,),
  'routed_experts_prompt_start': (0,),
  'skip_special_tokens': (False,),
  'spaces_between_special_tokens': (True,),
  'stop_token_ids': ([],),
  'structural_tag': (),
  'structured_outputs': ({},),
  'suffix': ('',),
  'thinking_token_budget': (),
  'truncate_prompt_tokens': (),
  'use_beam_search': (False,),
  'verbosity': ('medium',),
  'vllm_xargs': ({},),
  'watermarking': (False,),
  'web_search_options': (),
}
# Fields that say who asks, or how the reply is stored, queued, cached or cut into
# pieces. They leave the reply as it is.
IDLE_FIELDS = frozenset(
  (
    *('cache_salt', 'metadata', 'mm_payload', 'model', 'prediction', 'priority'),
    *('prompt_cache_key', 'prompt_cache_options', 'prompt_cache_retention'),
    *('request_id', 'safety_identifier', 'service_tier', 'session_id', 'store'),
    *('stream_interval', 'truncation_side', 'user'),
  )
)
# Fields that are honoured; each parser checks those of its own endpoint.
READ_FIELDS = frozenset(
  (
    *('chat_template_kwargs', 'logprobs', 'max_completion_tokens', 'max_tokens'),
    *('messages', 'n', 'parallel_tool_calls', 'prompt', 'return_token_ids', 'seed'),
    *(
      'reasoning_effort',
      'response_format',
      'stop',
      'stream',
      'stream_options',
      'temperature',
      'tool_choice',
      'tools',
    ),
    *('top_k', 'top_logprobs', 'top_p'),
  )
)
# The same of a message and of the parts of its content. Some clients send back all that
# they made of a reply, as `parsed` of OpenAI's and what LiteLLM adds.
_MESSAGE_READ = ('content', 'from', 'function_call', 'name', 'role', 'tool_call_id')
_MESSAGE_READ = (*_MESSAGE_READ, 'tool_calls', 'value', *THOUGHT_KEYS)
_MESSAGE_NEUTRAL: dict[str, tuple[Any, ...]] = {
  'audio': (),
  'refusal': ('',),
  'train': (1,),
  'weight': (1,),
}
_MESSAGE_IDLE = ('annotations', 'cache_control', 'parsed', 'provider_specific_fields')
_MESSAGE_IDLE = (*_MESSAGE_IDLE, 'reasoning_details', 'thinking_blocks')
_PART_READ = ('image', 'image_url', 'reasoning', 'text', 'thinking', 'type')
_PART_IDLE = ('annotations', 'cache_control', 'detail', 'prompt_cache_breakpoint')
MAX_IMAGES = 64  # of a request
MAX_TOP_LOGPROBS = 20  # of OpenAI's API


def parse_body(data: bytes) -> JsonObject:
  """Parses a request's body.

  Args:
    data: The body.

  Returns:
    The JSON object that it holds.

  Raises:
    ApiError: If it is not a JSON object.
  """
  try:
    body = parse_strict_json(data)
  except ValueError as error:
    raise ApiError(
      400, f'the body is not JSON: {error}', code='invalid_json'
    ) from error
  if not isinstance(body, dict):
    raise ApiError(400, 'the body must be a JSON object', code='invalid_json')
  return body


def parse_cached_chat(data: bytes, cache: RequestCache | None) -> GenerationRequest:
  """Parses a chat request, but of its messages only those that are not cached.

  Args:
    data: The body.
    cache: The session's earlier requests; the request is added. None parses all of it.

  Returns:
    The request.

  Raises:
    ApiError: Names the field at fault.
  """
  if cache is None:
    return parse_chat_body(data)
  try:
    body = cache.read(data, parse_client_messages)
    return parse_chat(body, body['messages'])
  except (ApiError, KeyError, RecursionError, ValueError):
    # Parses all of it, so that the error counts messages from the first one on.
    return parse_chat_body(data)


def may_hold_images(data: bytes) -> bool:
  """Returns whether a body may hold images, which take long to decode.

  Args:
    data: The body.

  Returns:
    False only if it holds none, or their type is written with escapes.
  """
  return b'"image' in data


def parse_chat_body(data: bytes) -> GenerationRequest:
  """Parses the body of a chat request, all of it.

  Args:
    data: The body.

  Returns:
    The request.

  Raises:
    ApiError: Names the field at fault.
  """
  return parse_chat(parse_body(data))


def parse_chat(
  body: JsonObject, messages: list[Message] | None = None
) -> GenerationRequest:
  """Parses a request to /v1/chat/completions.

  Args:
    body: The JSON object.
    messages: The messages of the body if they are parsed already.

  Returns:
    The request.

  Raises:
    ApiError: Names the field at fault.
  """
  if not isinstance(body.get('messages'), list):
    raise invalid_field(
      'messages', 'a list of messages is needed', 'missing_required_parameter'
    )
  tool_choice = body.get('tool_choice')
  tools = [] if tool_choice == 'none' else body.get('tools') or []
  if not isinstance(tools, list) or not all(map(_is_tool, tools)):
    raise invalid_field(
      'tools', "a list of {'type': 'function', 'function': {'name': …}}"
    )
  if tools and body.get('parallel_tool_calls') not in (None, True):
    raise invalid_field(
      'parallel_tool_calls',
      'a reply may have several calls: leave it out, or send true',
      'unsupported_value',
    )
  logprobs = _parse_flag(body, 'logprobs')
  top_logprobs = _parse_number(body, 'top_logprobs', int, 0, MAX_TOP_LOGPROBS) or 0
  if top_logprobs and not logprobs:
    raise invalid_field('top_logprobs', 'set logprobs, too')
  if messages is None:
    messages = parse_client_messages(body['messages'])
  return GenerationRequest(
    messages=messages,
    tools=tools,
    forced_tools=_parse_tool_choice(tool_choice, tools),
    json_schema=_parse_response_format(body.get('response_format')),
    logprobs=logprobs,
    top_logprobs=top_logprobs,
    template_options=_parse_template_options(body),
    **_parse_common_fields(body),
  )


def _parse_tool_choice(choice: object, tools: list[JsonObject]) -> tuple[str, ...]:
  """Returns the tools of which at least one must be called; () if none must."""
  if choice in (None, 'auto', 'none'):
    return ()
  names = [tool['function']['name'] for tool in tools]
  if choice != 'required':
    function = choice.get('function') if isinstance(choice, dict) else None
    name = function.get('name') if isinstance(function, dict) else None
    if name is None or function is None or not isinstance(choice, dict):
      raise invalid_field(
        'tool_choice',
        "'auto', 'none', 'required' or one function is needed",
        'unsupported_value',
      )
    check_fields(choice, ('function', 'type'), {}, (), 'tool_choice.')
    check_fields(function, ('name',), {}, (), 'tool_choice.function.')
    names = [one for one in names if one == name]
  if not names:
    raise invalid_field('tool_choice', 'there is no such tool')
  return tuple(names)


def _parse_response_format(value: Any) -> JsonObject | None:
  """Returns the JSON schema that a reply must have; None if it may be any text."""
  kind = value.get('type') if isinstance(value, dict) else None
  if value is None:
    return None
  place, idle = 'response_format.', ('description', 'name', 'strict')
  if kind in ('text', 'json_object'):
    check_fields(value, ('type',), {}, (), place)
    return None if kind == 'text' else {'type': 'object'}
  given = value.get('json_schema') if kind == 'json_schema' else None
  if isinstance(given, dict):
    check_fields(value, ('json_schema', 'type'), {}, (), place)
    check_fields(given, ('schema',), {}, idle, f'{place}json_schema.')
  schema = given.get('schema') if isinstance(given, dict) else None
  if not isinstance(schema, dict):
    raise invalid_field(
      'response_format',
      'text, json_object or json_schema with a schema is needed',
      'unsupported_value',
    )
  return schema


def _parse_template_options(body: JsonObject) -> JsonObject:
  """Returns what a chat request sets of the chat template."""
  options = body.get('chat_template_kwargs') or {}
  if not isinstance(options, dict):
    raise invalid_field('chat_template_kwargs', 'an object is needed')
  effort = body.get('reasoning_effort')
  return options if effort is None else {'reasoning_effort': effort, **options}


def parse_completion(body: JsonObject) -> GenerationRequest:
  """Parses a request to /v1/completions.

  Args:
    body: The JSON object.

  Returns:
    The request.

  Raises:
    ApiError: Names the field at fault.
  """
  prompt = body.get('prompt')
  if isinstance(prompt, list) and len(prompt) == 1 and not _are_token_ids(prompt):
    (prompt,) = prompt
  if not _are_token_ids(prompt) and not (isinstance(prompt, str) and prompt):
    raise invalid_field('prompt', 'one text or one list of token ids is needed')
  logprobs = body.get('logprobs')
  if logprobs not in (None, 0, 1):
    raise invalid_field(
      'logprobs', 'only that of the sampled token is supported', 'unsupported_value'
    )
  return GenerationRequest(
    prompt=prompt,
    logprobs=logprobs is not None,
    api='completions',
    **_parse_common_fields(body),
  )


def parse_client_messages(value: list[Any]) -> list[Message]:
  """Brings messages into one form, whoever wrote them.

  Args:
    value: The messages as the client sent them.

  Returns:
    The messages in the form of `data.chat_messages`.

  Raises:
    ApiError: If they are not messages, or have images that are missing, broken or too
      many. Images are `data:` URLs; nothing is fetched.
  """
  try:
    count = _num_images(value)
    if count > MAX_IMAGES:
      raise DataError(f'{count} images are too many: at most {MAX_IMAGES} are accepted')
    for i, message in enumerate(value):
      _check_message(message, f'messages[{i}].')
    messages = chat_messages.normalize_messages(value)
  except (DataError, TypeError, AttributeError) as error:
    raise invalid_field('messages', str(error)) from error
  if count and any(_lacks_image(message) for message in messages):
    raise invalid_field('messages', "an image needs image_url: {'url': 'data:…'}")
  return [_normalize(message) for message in messages]


def _check_message(message: Any, place: str) -> None:
  """Refuses what a message has that would be dropped."""
  if not isinstance(message, Mapping):
    return
  check_fields(message, _MESSAGE_READ, _MESSAGE_NEUTRAL, _MESSAGE_IDLE, place)
  content = message.get('content')
  for i, part in enumerate(content if isinstance(content, list) else ()):
    if isinstance(part, Mapping):
      inner = f'{place}content[{i}].'
      check_fields(part, _PART_READ, {}, _PART_IDLE, inner)
      image = part.get('image_url')
      if isinstance(image, Mapping):
        check_fields(image, ('url',), {}, ('detail',), f'{inner}image_url.')


def _num_images(value: list[Any]) -> int:
  """Counts the parts of messages that are images, before any is decoded."""
  contents = [m.get('content') for m in value if isinstance(m, Mapping)]
  return sum(
    isinstance(part, Mapping) and part.get('type') in chat_messages.IMAGE_TYPES
    for content in contents
    for part in (content if isinstance(content, list) else [content])
  )


def _lacks_image(message: Message) -> bool:
  return has_images([message]) and any(
    part['type'] == 'image' and part['image'] is None for part in message['content']
  )


def _normalize(message: Message) -> Message:
  """Drops empty fields and renames the role 'developer', which clients write freely."""
  fields = {k: v for k, v in message.items() if v or k == 'content'}
  if 'tool_calls' in fields:
    fields['tool_calls'] = [_normalize_call(call) for call in fields['tool_calls']]
  return {**fields, 'role': 'system'} if fields['role'] == 'developer' else fields


def _normalize_call(call: Any) -> Any:
  """Drops what OpenAI's client adds: `index` in streams, and arguments as parsed."""
  if not isinstance(call, Mapping):
    return call
  fields = {k: v for k, v in call.items() if k != 'index'}
  function = fields.get('function')
  if isinstance(function, Mapping):
    own = {k: v for k, v in function.items() if k != 'parsed_arguments'}
    fields['function'] = own
  return fields


def _parse_common_fields(body: JsonObject) -> Keywords:
  check_fields(body)
  has_new_limit = body.get('max_completion_tokens') is not None
  limit_field = 'max_completion_tokens' if has_new_limit else 'max_tokens'
  stop = body.get('stop') or ()
  stop = (stop,) if isinstance(stop, str) else stop
  if not isinstance(stop, list | tuple) or not all(
    isinstance(s, str) and s for s in stop
  ):
    raise invalid_field('stop', 'one text, or a list of texts, none of them empty')
  if len(stop) > 16 or any(len(s) > 256 for s in stop):
    raise invalid_field('stop', 'at most 16 texts of at most 256 letters')
  stream_options = body.get('stream_options') or {}
  if not isinstance(stream_options, dict):
    raise invalid_field('stream_options', 'an object is needed')
  check_fields(
    stream_options,
    ('include_usage',),
    {'continuous_usage_stats': (False,)},
    ('include_obfuscation',),
    'stream_options.',
  )
  return {
    'n': _parse_number(body, 'n', int, 1, 128) or 1,
    'stream': _parse_flag(body, 'stream'),
    'include_usage': _parse_flag(stream_options, 'include_usage'),
    'return_token_ids': _parse_flag(body, 'return_token_ids'),
    'max_tokens': _parse_number(body, limit_field, int, 1, 2**31),
    'temperature': _parse_number(body, 'temperature', float, 0, 100),
    'top_p': _parse_number(body, 'top_p', float, 1e-6, 1),
    'top_k': _parse_number(body, 'top_k', int, -1, 2**31),
    'stop': tuple(stop),
    'seed': _parse_number(body, 'seed', int, -(2**63), 2**64),
  }


def check_fields(
  body: Mapping[str, object],
  read: Collection[str] = READ_FIELDS,
  neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL_FIELDS,
  idle: Collection[str] = IDLE_FIELDS,
  place: str = '',
) -> None:
  """Raises ApiError for a field that would be dropped although it means something.

  Args:
    body: The fields of a request, or of a part of it.
    read: Fields that are honoured.
    neutral: Fields that are not, with the values that leave the reply as it is.
    idle: Fields that leave the reply as it is, whatever their value.
    place: Where the part is, such as 'stream_options.'.

  Raises:
    ApiError: Names the field at fault.
  """
  for name, value in body.items():
    if value is None or name in read or name in idle:
      continue
    if name not in neutral:
      near = closest_match(name, [*read, *neutral])
      hint = f'; did you mean {near!r}?' if near else ''
      message = f'this endpoint does not know the field{hint}'
      raise invalid_field(f'{place}{name}', message, 'unknown_parameter')
    if value not in neutral[name]:
      message = f'{value!r} is not supported here'[:200]
      raise invalid_field(f'{place}{name}', message, 'unsupported_value')


def is_number(value: Any, kind: type, low: float, high: float) -> bool:
  """Returns whether a value is a number within bounds.

  Args:
    value: Any JSON value.
    kind: int for whole numbers, float for any finite number.
    low: Lower bound.
    high: Upper bound.

  Returns:
    True if it is one.
  """
  if isinstance(value, bool) or not isinstance(value, (int, kind)):
    return False
  return math.isfinite(value) and low <= value <= high


def _parse_number(
  body: JsonObject, name: str, kind: type, low: float, high: float
) -> Any:
  value = body.get(name)
  if value is not None and not is_number(value, kind, low, high):
    noun = 'a whole number' if kind is int else 'a number'
    raise invalid_field(name, f'{noun} from {low:g} to {high:g} is needed')
  return value


def _parse_flag(body: JsonObject, name: str) -> bool:
  value = body.get(name)
  if value not in (None, True, False):
    raise invalid_field(name, 'true or false is needed')
  return bool(value)


def _are_token_ids(value: object) -> bool:
  """Returns whether a value is a list of token ids, without a Python loop over them."""
  if not isinstance(value, list) or set(map(type, value)) != {int}:
    return False
  return min(value) >= 0 and max(value) < 2**31


def _is_tool(tool: object) -> bool:
  function = tool.get('function') if isinstance(tool, dict) else None
  return isinstance(function, dict) and isinstance(function.get('name'), str)
