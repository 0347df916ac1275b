"""Tests that no field of OpenAI's or vLLM's API is accepted and then dropped."""

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from jaxrl.rollout.gateway import openai_requests
from jaxrl.rollout.gateway.openai_requests import (
  IDLE_FIELDS,
  NEUTRAL_FIELDS,
  READ_FIELDS,
  ApiError,
)

KNOWN = {*IDLE_FIELDS, *NEUTRAL_FIELDS, *READ_FIELDS}
# A value of each field that would change the reply.
CHANGING = {
  'add_generation_prompt': False,
  'add_special_tokens': True,
  'allowed_token_ids': [1, 2],
  'audio': {'voice': 'x', 'format': 'wav'},
  'bad_words': ['no'],
  'best_of': 2,
  'chat_template': '{{ messages }}',
  'continue_final_message': True,
  'documents': [{'title': 'a'}],
  'echo': True,
  'ec_transfer_params': {'a': 1},
  'frequency_penalty': 0.5,
  'function_call': 'auto',
  'functions': [{'name': 'f'}],
  'guided_choice': ['a', 'b'],
  'guided_decoding_backend': 'xgrammar',
  'guided_grammar': 'root ::= "a"',
  'guided_json': {'type': 'object'},
  'guided_regex': 'a+',
  'guided_whitespace_pattern': ' ',
  'ignore_eos': True,
  'include_reasoning': False,
  'include_stop_str_in_output': True,
  'kv_transfer_params': {'a': 1},
  'length_penalty': 2.0,
  'logit_bias': {'5': 100},
  'logprob_token_ids': [3],
  'media_io_kwargs': {'image': {}},
  'min_p': 0.1,
  'min_tokens': 4,
  'mm_processor_kwargs': {'a': 1},
  'modalities': ['audio'],
  'moderation': {'a': 1},
  'parallel_tool_calls': False,
  'presence_penalty': -1,
  'prompt_embeds': 'AAAA',
  'prompt_logprobs': 0,
  'reasoning': {'effort': 'low'},
  'repetition_detection': {'a': 1},
  'repetition_penalty': 1.1,
  'return_mm_kwargs': True,
  'return_prompt_text': True,
  'return_token_offsets': True,
  'return_tokens_as_token_ids': True,
  'routed_experts_prompt_start': 1,
  'skip_special_tokens': True,
  'spaces_between_special_tokens': False,
  'stop_token_ids': [7],
  'structural_tag': 'x',
  'structured_outputs': {'regex': 'a'},
  'suffix': 'x',
  'thinking_token_budget': 5,
  'truncate_prompt_tokens': 10,
  'use_beam_search': True,
  'verbosity': 'low',
  'vllm_xargs': {'a': 1},
  'watermarking': True,
  'web_search_options': {},
}
TOOL = {'type': 'function', 'function': {'name': 'f', 'parameters': {}}}
CHAT = {'messages': [{'role': 'user', 'content': 'hi'}], 'tools': [TOOL]}


def test_every_unsupported_field_has_a_case():
  assert set(NEUTRAL_FIELDS) <= set(CHANGING)


@pytest.mark.parametrize(('name', 'value'), CHANGING.items())
def test_a_field_that_would_change_the_reply_is_refused_by_name(name, value):
  with pytest.raises(ApiError) as error:
    openai_requests.parse_chat({**CHAT, name: value})
  assert error.value.status == 400
  assert error.value.param == name
  assert name in str(error.value)
  if name in NEUTRAL_FIELDS:  # those of chats alone are no fields of completions
    with pytest.raises(ApiError):
      openai_requests.parse_completion({'prompt': 'hi', name: value})


@pytest.mark.parametrize('name', sorted(NEUTRAL_FIELDS))
def test_values_that_change_nothing_are_accepted(name):
  for value in (None, *NEUTRAL_FIELDS[name]):
    openai_requests.parse_chat({**CHAT, name: value})


@pytest.mark.parametrize('name', sorted(IDLE_FIELDS))
def test_fields_of_no_effect_are_accepted(name):
  openai_requests.parse_chat({**CHAT, name: 'anything'})


@pytest.mark.parametrize(
  ('name', 'near'), [('max_token', 'max_tokens'), ('temprature', 'temperature')]
)
def test_a_misspelt_field_is_answered_with_the_right_one(name, near):
  with pytest.raises(ApiError, match=f'{name}: .* did you mean {near!r}'):
    openai_requests.parse_chat({**CHAT, name: 1})


def test_one_call_at_a_time_is_refused_only_where_there_are_tools():
  openai_requests.parse_chat(
    {'messages': CHAT['messages'], 'parallel_tool_calls': False}
  )
  openai_requests.parse_chat({**CHAT, 'parallel_tool_calls': True})


@pytest.mark.parametrize('module', [chat_params, completion_params])
def test_all_fields_of_openai_are_decided(module):
  fields = set(module.CompletionCreateParamsBase.__annotations__)
  assert len(fields) > 10
  assert fields <= KNOWN


@pytest.mark.vllm
def test_all_fields_of_vllm_are_decided():
  chat = pytest.importorskip('vllm.entrypoints.openai.chat_completion.protocol')
  completion = pytest.importorskip('vllm.entrypoints.openai.completion.protocol')
  fields = {
    *chat.ChatCompletionRequest.model_fields,
    *completion.CompletionRequest.model_fields,
  }
  assert len(fields) > 50
  assert fields <= KNOWN
