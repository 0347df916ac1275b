"""The Responses API and Anthropic's over HTTP: what is read, and what is refused."""

import asyncio
import base64
import json
import logging
import random

import pytest

from jaxrl.rollout.gateway import anthropic_requests, responses_requests
from jaxrl.rollout.gateway.generation_request import ApiError
from tests.data.letters import END
from tests.rollout.gateway.agents import (
  CALL,
  KEY,
  OWN,
  TOOLS,
  Engine,
  ThinkingTokens,
  endpoint,
  named_events,
  post,
)
from tests.rollout.gateway.wire_forms import APIS, PATHS, ask, tools_of

HELLO = {
  'responses': {'input': 'hi'},
  'messages': {'max_tokens': 90, 'messages': [{'role': 'user', 'content': 'hi'}]},
}
CASES = {
  'responses': [
    ({'input': 7}, 'input'),
    ({'input': []}, 'input'),
    ({'input': [{'type': 'computer_call', 'id': 'x'}]}, 'input[0].type'),
    ({'input': [{'role': 'wizard', 'content': 'x'}]}, 'input[0].role'),
    ({'input': [{'role': 'user', 'content': [{'type': 'input_file'}]}]},
     'input[0].content[0].type'),
    ({'input': [{'role': 'user', 'content': 'a'}, {'type': 'function_call_output'}]},
     'input[1].call_id'),
    ({'input': [{'type': 'function_call', 'call_id': 'a', 'name': 'f',
                 'arguments': '{'}]}, 'input'),
    ({'input': [{'role': 'user', 'content': [
      {'type': 'input_image', 'image_url': 'http://a/b.png'}]}]}, 'input[0]'),
    ({'input': 'x' * 3000}, 'input'),
    ({'max_output_tokens': 0}, 'max_output_tokens'),
    ({'max_output_tokens': 'many'}, 'max_output_tokens'),
    ({'temperature': True}, 'temperature'),
    ({'top_p': 7}, 'top_p'),
    ({'stream': 'yes'}, 'stream'),
    ({'previous_response_id': 'resp_1'}, 'previous_response_id'),
    ({'tools': [{'type': 'web_search'}]}, 'tools[0].type'),
    ({'tools': tools_of('responses', TOOLS), 'tool_choice': 'required'}, 'tool_choice'),
    ({'tools': tools_of('responses', TOOLS),
      'tool_choice': {'type': 'function', 'name': 'add'}}, 'tool_choice'),
    ({'tools': tools_of('responses', TOOLS), 'parallel_tool_calls': False},
     'parallel_tool_calls'),
    ({'text': {'format': {'type': 'json_object'}}}, 'text.format'),
    ({'text': {'verbosity': 'low'}}, 'text.verbosity'),
    ({'top_logprobs': 3}, 'top_logprobs'),
    ({'include': ['everything']}, 'include[0]'),
    ({'background': True}, 'background'),
    ({'conversation': 'conv_1'}, 'conversation'),
    ({'prompt': {'id': 'p'}}, 'prompt'),
    ({'truncation': 'auto'}, 'truncation'),
    ({'inputs': 'x'}, 'inputs'),
  ],
  'messages': [
    ({'messages': 'hi'}, 'messages'),
    ({'messages': []}, 'messages'),
    ({'messages': [{'role': 'wizard', 'content': 'x'}]}, 'messages[0].role'),
    ({'messages': [{'role': 'user', 'content': [{'type': 'document'}]}]},
     'messages[0].content[0].type'),
    ({'messages': [{'role': 'user', 'content': [{'type': 'tool_use', 'id': 'a',
                                                 'name': 'f', 'input': {}}]}]},
     'messages[0].content'),
    ({'messages': [{'role': 'user', 'content': [
      {'type': 'text', 'text': 'x'}, {'type': 'tool_result', 'tool_use_id': 'a'}]}]},
     'messages[0].content'),
    ({'messages': [{'role': 'user', 'content': [{'type': 'image', 'source': {
      'type': 'url', 'url': 'http://a/b.png'}}]}]},
     'messages[0].content[0].source.type'),
    ({'messages': [{'role': 'user', 'content': 'a'},
                   {'role': 'assistant', 'content': 'b'}]}, 'messages'),
    ({'messages': [{'role': 'user', 'content': 'x' * 3000}]}, 'messages'),
    ({'max_tokens': None}, 'max_tokens'),
    ({'max_tokens': 0}, 'max_tokens'),
    ({'temperature': 'hot'}, 'temperature'),
    ({'stop_sequences': ['']}, 'stop_sequences'),
    ({'system': 7}, 'system'),
    ({'tools': [{'name': 'add'}]}, 'tools[0].input_schema'),
    ({'tools': [{'type': 'bash_20250124', 'name': 'bash', 'input_schema': {}}]},
     'tools[0].type'),
    ({'tools': tools_of('messages', TOOLS), 'tool_choice': {'type': 'any'}},
     'tool_choice'),
    ({'tools': tools_of('messages', TOOLS),
      'tool_choice': {'type': 'tool', 'name': 'add'}}, 'tool_choice'),
    ({'tools': tools_of('messages', TOOLS),
      'tool_choice': {'type': 'auto', 'disable_parallel_tool_use': True}},
     'tool_choice.disable_parallel_tool_use'),
    ({'thinking': {'type': 'enabled', 'budget_tokens': 1024}}, 'thinking'),
    ({'thinking': {'type': 'enabled', 'budget_tokens': 9}}, 'thinking.budget_tokens'),
    ({'output_config': {'format': {'type': 'json_schema', 'schema': {}}}},
     'output_config.format'),
    ({'mcp_servers': [{'url': 'x'}]}, 'mcp_servers'),
    ({'max_token': 3}, 'max_token'),
  ],
}  # fmt: skip
BAD = [(api, *case) for api in CASES for case in CASES[api]]


def says(text, **options):
  return Engine(lambda prompt, sampling: text, **options)


def written(row):
  return ''.join(chr(i % OWN) for i in row.tokens[row.action_mask])


def message_of(api, response):
  """What is wrong, as a client of this API is told."""
  if api == 'responses':
    assert response['error']['type'] == 'invalid_request_error'
    return response['error']['message']
  assert response.keys() == {'type', 'error'} and response['type'] == 'error'
  assert response['error'].keys() == {'type', 'message'}
  assert response['error']['type'] == 'invalid_request_error'
  return response['error']['message']


@pytest.mark.parametrize(('api', 'change', 'field'), BAD)
async def test_a_field_at_fault_is_named(api, change, field, caplog):
  caplog.set_level(logging.INFO, 'jaxrl')
  engine = says('yes' + END)
  async with endpoint(engine) as (client, delivered):
    status, response = await post(client, PATHS[api], {**HELLO[api], **change})
    assert status == 400
    message = message_of(api, response)
    assert message.startswith(f'{field}:') or 'window of 2000' in message, message
    assert engine.calls == []
    records = [r for r in caplog.records if r.name.startswith('jaxrl')]
    assert len(records) == 1 and not records[0].exc_info
    assert f'{PATHS[api]}: 400' in records[0].getMessage()
    # Nothing is lost by it.
    assert (await post(client, PATHS[api], HELLO[api]))[0] == 200
    await post(client, '/feedback', {})
  assert [written(row) for row in delivered['0/']] == ['yes' + END]


@pytest.mark.parametrize('api', HELLO)
@pytest.mark.parametrize(
  'body',
  [b'', b'[]', b'{"input": NaN}', b'{"messages": "\\ud800"}', b'[' * 10**5, b'\xff'],
  ids=['empty', 'list', 'nan', 'surrogate', 'deep', 'bytes'],
)
async def test_what_is_not_json(api, body):
  async with endpoint() as (client, _):
    status, response = await post(client, PATHS[api], body)
    assert status == 400 and 'JSON' in message_of(api, response)


@pytest.mark.parametrize('api', HELLO)
async def test_deep_values_and_broken_streams_are_answered(api):
  deep = b'{"a":' * 900 + b'1' + b'}' * 900
  engine = says(RuntimeError('secret'))
  async with endpoint(engine, limits={'max_body': 10_000}) as (client, _):
    status, _ = await post(client, PATHS[api], b'{"metadata":' + deep + b'}')
    assert status == 400
    status, response = await post(client, PATHS[api], {'user': 'x' * 20_000})
    assert status == 413
    events = await named_events(client, PATHS[api], HELLO[api])
    text = json.dumps([response, events])
    assert 'secret' not in text
  if api == 'messages':
    assert response['error']['type'] == 'request_too_large'
    assert events[-1] == {
      'type': 'error',
      'error': {'type': 'api_error', 'message': 'the engine failed: RuntimeError'},
    }
  else:
    assert events[-1]['type'] == 'response.failed'
    assert events[-1]['response']['status'] == 'failed'
    assert events[-1]['response']['error']['code'] == 'server_error'


async def test_anthropics_headers():
  async with endpoint(says('yes' + END)) as (client, delivered):
    path, body = PATHS['messages'], HELLO['messages']
    key = {'x_api_key': f'{KEY}/mine', 'anthropic_version': '2023-06-01'}
    del client.headers['Authorization']
    assert (await post(client, path, body, **key))[0] == 200
    status, response = await post(client, path, body, x_api_key='wrong')
    assert status == 401 and response['error']['type'] == 'authentication_error'
    status, response = await post(client, path, body)
    assert status == 401
    key['anthropic_version'] = '2023-01-01'
    status, response = await post(client, path, body, **key)
    assert status == 400 and 'anthropic-version' in response['error']['message']
    assert (await post(client, '/feedback', {}, x_api_key=f'{KEY}/mine'))[0] == 200
  assert [written(row) for row in delivered['0/mine']] == ['yes' + END]


async def test_a_long_silence_has_pings():
  engine = says(f'{CALL}{END}', delay=0.005)
  async with endpoint(engine, limits={'heartbeat': 0.05}) as (client, _):
    body = {**HELLO['messages'], 'tools': tools_of('messages', TOOLS)}
    events = await named_events(client, PATHS['messages'], body)
    kinds = [event['type'] for event in events]
    assert kinds.count('ping') > 3
    body = {**HELLO['responses'], 'tools': tools_of('responses', TOOLS)}
    events = await named_events(client, PATHS['responses'], body)
    assert len(events) == 7


@pytest.mark.parametrize('api', APIS)
async def test_a_reply_in_one_api_is_known_in_the_others(api):
  thought = '\n<think>\n Hm, so. \n\n</think>\n\n'
  call = CALL.replace('"x": 1', '"x": 1.0')  # JavaScript sends 1 back
  replies = iter(
    [f'{thought}Wait.{call}{END}', 'one' + END, 'two' + END, 'three' + END]
  )
  engine = Engine(lambda prompt, sampling: next(replies))
  rng = random.Random(0)
  async with endpoint(engine, tokens=ThinkingTokens) as (client, delivered):
    options = {'tools': TOOLS, 'session': 's'}
    begun = [('user', 'hi')]
    (reply,) = await ask(client, api, begun, rng, **options)
    assert reply.thought == ('' if api == 'chat' else 'Hm, so.')
    heard = ('tool', reply.calls[0][0], '2')
    for other in APIS:
      await ask(client, other, [*begun, reply, heard], rng, **options)
    await post(client, '/feedback', {}, x_session_id='s')
  rows = delivered['0/s']
  assert len(rows) == 3
  assert written(rows[0]) == f'{thought}Wait.{call}{END}one{END}'
  assert [written(row) for row in rows[1:]] == ['two' + END, 'three' + END]


@pytest.mark.parametrize('api', HELLO)
async def test_a_conversation_whose_thought_was_left_out_is_another_one(api):
  engine = says(f'<think>Hm.</think>yes{END}')
  rng = random.Random(0)
  async with endpoint(engine, tokens=ThinkingTokens) as (client, delivered):
    begun = [('user', 'hi')]
    (reply,) = await ask(client, api, begun, rng, session='s')
    reply.thought, reply.items = '', []
    await ask(client, 'chat', [*begun, reply, ('user', 'so?')], rng, session='s')
    await post(client, '/feedback', {}, x_session_id='s')
  assert len(delivered['0/s']) == 2


async def test_thoughts_come_back_encrypted_too():
  engine = says(f'<think>Hm.</think>yes{END}')
  async with endpoint(engine, tokens=ThinkingTokens) as (client, delivered):
    include = ['reasoning.encrypted_content']
    body = {**HELLO['responses'], 'include': include}
    _, response = await post(client, PATHS['responses'], body)
    thought, said = response['output']
    assert base64.b64decode(thought['encrypted_content']) == b'Hm.'
    del thought['content']  # as some clients do
    history = [{'role': 'user', 'content': 'hi'}, thought, said]
    body['input'] = [*history, {'role': 'user', 'content': 'so?'}]
    events = await named_events(client, PATHS['responses'], body)
    done = next(e for e in events if e['type'] == 'response.output_item.done')
    assert base64.b64decode(done['item']['encrypted_content']) == b'Hm.'
    await post(client, '/feedback', {})
  assert len(delivered['0/']) == 1


async def test_two_replies_in_a_row_stay_two():
  engine = says('yes' + END)
  async with endpoint(engine) as (client, delivered):
    body = {'input': [{'role': 'user', 'content': 'hi'}]}
    for _ in range(3):
      _, response = await post(client, PATHS['responses'], body)
      body['input'] += response['output']
    await post(client, '/feedback', {})
  assert [written(row) for row in delivered['0/']] == [('yes' + END) * 3]


async def test_instructions_are_of_one_request():
  engine = says('yes' + END)
  async with endpoint(engine) as (client, delivered):
    path = PATHS['responses']
    body = {'input': 'hi', 'instructions': 'Be kind.'}
    _, response = await post(client, path, body)
    more = {'input': 'so?', 'previous_response_id': response['id']}
    await post(client, path, {**more, 'instructions': 'Be kind.'})
    await post(client, path, more)
    await post(client, path, {**more, 'instructions': 'Be rude.'})
    await post(client, '/feedback', {})
  prompts = [''.join(chr(i % OWN) for i in prompt) for _, prompt, _, _ in engine.calls]
  assert prompts[1].startswith('<system:Be kind.><user:hi><assistant:yes>')
  assert prompts[2].startswith('<user:hi><assistant:yes>')
  assert prompts[3].startswith('<system:Be rude.><user:hi><assistant:yes>')
  assert len(delivered['0/']) == 3  # of other instructions, all is read anew


async def test_log_probs_of_a_response():
  engine = says('yes' + END)
  async with endpoint(engine) as (client, _):
    include = ['message.output_text.logprobs']
    body = {**HELLO['responses'], 'include': include, 'return_token_ids': True}
    _, response = await post(client, PATHS['responses'], body)
    events = await named_events(client, PATHS['responses'], body)
  (part,) = response['output'][0]['content']
  assert [entry['logprob'] for entry in part['logprobs']] == (
    engine.calls[0][2].logprobs.tolist()
  )
  assert response['token_ids'] == engine.calls[0][2].tokens.tolist()
  assert events[-1]['response']['output'][0]['content'][0]['logprobs']


def test_the_fields_of_the_clients_are_decided():
  from anthropic.types import message_create_params  # seconds, as for openai
  from openai.types.responses import response_create_params

  for module, own, name in (
    (responses_requests, response_create_params, 'ResponseCreateParamsBase'),
    (anthropic_requests, message_create_params, 'MessageCreateParamsBase'),
  ):
    fields = set(getattr(own, name).__annotations__)
    known = {*module.READ_FIELDS, *module.NEUTRAL_FIELDS, *module.IDLE_FIELDS}
    assert len(fields) > 10 and fields <= known, fields - known


def test_thinking_is_an_option_of_the_template():
  with pytest.raises(ApiError, match='display'):
    thinking = {'type': 'adaptive', 'display': 'omitted'}
    body = {**HELLO['messages'], 'thinking': thinking}
    anthropic_requests.parse_messages(json.dumps(body).encode(), None)
  for kind, wanted in (('disabled', False), ('enabled', True), ('adaptive', None)):
    body = {**HELLO['messages'], 'thinking': {'type': kind}}
    request = anthropic_requests.parse_messages(json.dumps(body).encode(), None)
    assert request.thinking is wanted


async def test_at_once_in_all_apis():
  engine = says('yes' + END, delay=0.002)
  rng = random.Random(1)
  async with endpoint(engine) as (client, delivered):
    begun = [('user', 'hi')]
    await asyncio.gather(
      *(ask(client, api, begun, rng, session='s') for api in APIS * 3)
    )
    await post(client, '/feedback', {}, x_session_id='s')
  assert len(delivered['0/s']) == 9


@pytest.mark.parametrize('api', APIS)
async def test_a_reply_is_rewarded_by_its_id(api):
  async with endpoint(says('yes' + END)) as (client, delivered):
    (reply,) = await ask(client, api, [('user', 'hi')], random.Random(2), session='s')
    body = {'reward': 0.5, 'completion_id': reply.name, 'done': False}
    assert (await post(client, '/feedback', body, x_session_id='s'))[0] == 200
    await post(client, '/feedback', {'reward': 1.0}, x_session_id='s')
  assert delivered['0/s'][0].score == 1.5


@pytest.mark.parametrize('content', ['no disk', [{'type': 'text', 'text': 'no disk'}]])
async def test_the_model_reads_that_a_tool_failed(content):
  engine = says('ok' + END)
  async with endpoint(engine) as (http, _):
    use = {'type': 'tool_use', 'id': 'a', 'name': 'add', 'input': {}}
    for is_error in (True, False):
      result = {'type': 'tool_result', 'tool_use_id': 'a', 'is_error': is_error}
      body = {
        'max_tokens': 90,
        'messages': [
          {'role': 'user', 'content': 'hi'},
          {'role': 'assistant', 'content': [use]},
          {'role': 'user', 'content': [{**result, 'content': content}]},
        ],
      }
      status, _ = await post(http, '/v1/messages', body)
      assert status == 200
  heard = [''.join(chr(i % OWN) for i in prompt) for _, prompt, *_ in engine.calls]
  assert '<tool:Error: no disk' in heard[0] and '<tool:no disk' in heard[1]
