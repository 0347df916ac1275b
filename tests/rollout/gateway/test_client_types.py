"""No field of the official clients is dropped without a word, however deep it is."""

import functools

import pytest

from jaxrl.rollout.gateway import (
  anthropic_requests,
  openai_requests,
  responses_requests,
)
from tests.rollout.gateway.client_types import Walk

HELLO = {'role': 'user', 'content': 'hi'}
FUNCTION = {'name': 'x', 'parameters': {}}
# What a body has besides the field that is tried.
BODIES = {
  'chat': {
    'messages': [HELLO],
    'tools': [{'type': 'function', 'function': FUNCTION}],
    'logprobs': True,
  },
  'responses': {'input': 'hi', 'tools': [{'type': 'function', **FUNCTION}]},
  'messages': {
    'messages': [HELLO],
    'max_tokens': 9,
    'tools': [{'name': 'x', 'input_schema': {}}],
  },
}
BODIES['beta'] = BODIES['messages']
# Fields that may have any value without effect, by the class of the client that has
# them. Of most requests: who asks, and how a reply is stored, billed, queued or cached.
ADMINISTRATION = {
  'chat': {
    *('metadata', 'model', 'prompt_cache_key', 'prompt_cache_options'),
    *('prompt_cache_retention', 'safety_identifier', 'service_tier', 'store', 'user'),
    'prediction',  # what the reply may be like, so that it comes sooner
  },
  'responses': {
    *('access_programs', 'metadata', 'model', 'prompt_cache_key'),
    *('prompt_cache_retention', 'safety_identifier', 'service_tier', 'store', 'user'),
    'max_tool_calls',  # of tools that the API runs
  },
  'messages': {
    *('cache_control', 'diagnostics', 'inference_geo', 'metadata', 'model'),
    *('service_tier', 'user_profile_id', 'workspace_id'),
  },
}
ADMINISTRATION['beta'] = ADMINISTRATION['messages'] | {'betas'}
IGNORED = {
  'chat': {
    'ChatCompletionContentPartImageParam.prompt_cache_breakpoint',
    'ChatCompletionContentPartTextParam.prompt_cache_breakpoint',
    'ChatCompletionStreamOptionsParam.include_obfuscation',  # of lengths
    'ImageURL.detail',  # the model's own settings say how images are resized
    *('JSONSchema.description', 'JSONSchema.name'),
    'JSONSchema.strict',  # a schema is always kept
  },
  'responses': {
    'EasyInputMessageParam.type',  # which may be left out, as in Message
    *('Message.type', 'FunctionToolParam.strict'),
    *('ResponseFormatTextJSONSchemaConfigParam.description',),
    *('ResponseFormatTextJSONSchemaConfigParam.name',),
    *('ResponseFormatTextJSONSchemaConfigParam.strict',),
    *('ResponseInputTextContentParam.prompt_cache_breakpoint',),
    *('ResponseInputTextParam.prompt_cache_breakpoint',),
    *('PromptCacheOptions.comparison_response_id', 'PromptCacheOptions.mode'),
    *('PromptCacheOptions.ttl', 'ResponseCreateParamsBase.stream_options'),
    # What is known of an earlier turn besides what was said and called. Ids join the
    # items of a reply if they are this endpoint's.
    *('EasyInputMessageParam.phase', 'FunctionCallOutput.caller'),
    *('FunctionCallOutput.id', 'FunctionCallOutput.status', 'Message.status'),
    *('ResponseFunctionToolCallParam.async', 'ResponseFunctionToolCallParam.caller'),
    *('ResponseFunctionToolCallParam.id', 'ResponseFunctionToolCallParam.status'),
    *('ResponseOutputMessageParam.id', 'ResponseOutputMessageParam.phase'),
    *('ResponseOutputMessageParam.status', 'ResponseOutputTextParam.annotations'),
    *('ResponseOutputTextParam.logprobs', 'ResponseReasoningItemParam.id'),
    'ResponseReasoningItemParam.encrypted_content',  # read if this endpoint wrote it
    'ResponseReasoningItemParam.status',
  },
  'messages': {
    'Base64ImageSourceParam.media_type',  # the image itself says what it is
    *('ImageBlockParam.cache_control', 'TextBlockParam.cache_control'),
    *('ToolParam.cache_control', 'ToolResultBlockParam.cache_control'),
    *('ToolUseBlockParam.cache_control', 'ToolUseBlockParam.caller'),
    *('TextBlockParam.citations', 'ThinkingBlockParam.signature'),
    *('ToolParam.eager_input_streaming', 'ToolParam.strict', 'ToolParam.type'),
  },
}
IGNORED['beta'] = {f'Beta{label}' for label in IGNORED['messages']}
for api, fields in ADMINISTRATION.items():
  class_name = {'chat': 'Completion', 'responses': 'Response'}.get(api, 'Message')
  IGNORED[api] |= {f'{class_name}CreateParamsBase.{field}' for field in fields}


def earlier(name):
  return [HELLO, {'role': 'assistant', 'content': 'yes'}]


def parse(api, data):
  if api == 'chat':
    return openai_requests.parse_cached_chat(data, None)
  if api == 'responses':
    return responses_requests.parse_responses(data, None, earlier)
  return anthropic_requests.parse_messages(data, None)


def params(api):
  """The client's type of a request."""
  if api == 'chat':
    from openai.types.chat import completion_create_params as module  # seconds
  elif api == 'responses':
    from openai.types.responses import response_create_params as module
  elif api == 'messages':
    from anthropic.types import message_create_params as module
  else:
    from anthropic.types.beta import message_create_params as module
  names = ('CompletionCreate', 'ResponseCreate', 'MessageCreate')
  return next(
    getattr(module, f'{name}ParamsBase')
    for name in names
    if hasattr(module, f'{name}ParamsBase')
  )


def body(api, fields):
  """A body of some fields; a message that is tried does not come last."""
  if 'messages' in fields and isinstance(fields['messages'], list):
    fields = {**fields, 'messages': [*fields['messages'], HELLO]}
  return {**BODIES[api], **fields}


@pytest.mark.parametrize('api', BODIES)
def test_no_field_is_dropped_that_is_not_named_here(api):
  walk = Walk(functools.partial(parse, api), IGNORED[api])
  kind = params(api)
  walk.try_fields(kind, functools.partial(body, api))
  without_effect = {label for label, decided in walk.decided.items() if not decided}
  assert without_effect == IGNORED[api]
