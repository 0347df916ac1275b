"""The endpoint over real HTTP: who gets in, what is answered, what is refused."""

import asyncio
import contextlib
import json

import aiohttp
import pytest

from jaxrl.data.chat_tokenizer import ChatTokenizer
from jaxrl.rollout.engine.actor_proxy import EngineDeadError
from jaxrl.rollout.engine.router import EngineRouter
from jaxrl.rollout.gateway.connection_limits import ConnectionLimits
from jaxrl.rollout.gateway.gateway import Gateway
from jaxrl.rollout.gateway.openai_requests import ApiError, GenerationRequest
from jaxrl.types import PromptTooLongError
from tests.data.letters import END
from tests.rollout.gateway.agents import (
  CALL,
  KEY,
  OWN,
  TOOLS,
  Engine,
  Tokens,
  endpoint,
  events,
  post,
)

PATH = '/v1/chat/completions'
ASK = {'model': 'policy', 'messages': [{'role': 'user', 'content': 'hi'}]}


def says(text):
  return Engine(lambda prompt, sampling: text)


def written(row):
  return ''.join(chr(i % OWN) for i in row.tokens[row.action_mask])


# ---- the answers


async def test_a_chat_completion():
  engine = says('yes' + END)
  async with endpoint(engine) as (client, _):
    body = {**ASK, 'logprobs': True, 'return_token_ids': True, 'temperature': 0.5}
    status, response = await post(client, PATH, body)
  _, prompt, output, sampling = engine.calls[0]
  (choice,) = response['choices']
  assert status == 200 and response['object'] == 'chat.completion'
  assert choice['message'] == {'role': 'assistant', 'content': 'yes', 'refusal': None}
  assert choice['finish_reason'] == 'stop'
  assert choice['token_ids'] == output.tokens.tolist()
  assert response['prompt_token_ids'] == prompt
  drawn = [entry['logprob'] for entry in choice['logprobs']['content']]
  assert drawn == output.logprobs.tolist()
  usage = {'prompt_tokens': len(prompt), 'completion_tokens': 4}
  assert response['usage'] == {**usage, 'total_tokens': len(prompt) + 4}
  assert (sampling.temperature, sampling.stop_token_ids) == (0.5, (ord(END),))


async def test_the_trainer_can_fix_how_replies_are_drawn():
  engine = says('yes' + END)
  async with endpoint(engine, fixed_sampling=True, temperature=0.7) as (client, _):
    await post(client, PATH, {**ASK, 'temperature': 0, 'top_p': 0.1, 'max_tokens': 2})
  sampling = engine.calls[0][3]
  assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.7, 1.0, 2)


async def test_seeds_differ_by_turn_and_repeat_by_session():
  async def seeds(*names):
    engine = says('x' + END)
    async with endpoint(engine) as (client, _):
      for name in names:
        await post(client, PATH, {**ASK, 'n': 2}, x_session_id=name)
    return [call[3].seed for call in engine.calls]

  first = await seeds('a', 'a', 'b')
  assert len(set(first)) == 6
  assert await seeds('b', 'a', 'a') == first[4:] + first[:4]


async def test_tool_calls():
  async with endpoint(says(f'I add.\n{CALL}{CALL}{END}')) as (client, _):
    _, response = await post(client, PATH, {**ASK, 'tools': TOOLS})
    (choice,) = response['choices']
    assert choice['finish_reason'] == 'tool_calls'
    assert choice['message']['content'] == 'I add.'
    calls = choice['message']['tool_calls']
    assert json.loads(calls[1]['function']['arguments']) == {'x': 1, 'y': 'é'}
    assert calls[0]['id'] != calls[1]['id']
    _, response = await post(
      client, PATH, {**ASK, 'tools': TOOLS, 'tool_choice': 'none'}
    )
    assert '<tool_call>' in response['choices'][0]['message']['content']


@pytest.mark.parametrize(
  'broken',
  ['{"name": 3}', '{"name": "a"', '', pytest.param('[' * 10**5, id='deep')],
)
async def test_a_call_that_cannot_be_read_is_text(broken):
  text = f'<tool_call>{broken}</tool_call>'
  engine = says(text + END)
  options = {'max_length': 10**6, 'max_tokens': 10**6}
  async with endpoint(engine, **options) as (client, _):
    _, response = await post(client, PATH, {**ASK, 'tools': TOOLS})
  assert response['choices'][0]['message']['content'] == text
  assert response['choices'][0]['finish_reason'] == 'stop'


async def test_a_stream_comes_in_pieces_and_says_the_same():
  text = f'Let me <see> it.{CALL}'
  engine = Engine(lambda prompt, sampling: text + END, delay=0.002)
  async with endpoint(engine) as (client, _):
    body = {**ASK, 'tools': TOOLS, 'stream_options': {'include_usage': True}}
    chunks = await events(client, PATH, body)
  *chunks, last = chunks
  assert last['choices'] == [] and last['usage']['completion_tokens'] == len(text) + 1
  deltas = [chunk['choices'][0]['delta'] for chunk in chunks]
  assert deltas[0]['role'] == 'assistant'
  assert ''.join(d.get('content') or '' for d in deltas) == 'Let me <see> it.'
  assert sum(bool(d.get('content')) for d in deltas) > 2
  assert deltas[-1]['tool_calls'][0]['function']['name'] == 'add'
  assert [c['choices'][0]['finish_reason'] for c in chunks[-2:]] == [None, 'tool_calls']


@pytest.mark.parametrize('ends', ['}', ''])
async def test_what_may_be_a_call_is_not_streamed_as_text(ends):
  text = '{"name": "add", "parameters": {"x": 1}' + ends
  engine = Engine(lambda prompt, sampling: text + END, delay=0.002)
  async with endpoint(engine) as (client, _):
    chunks = await events(client, PATH, {**ASK, 'tools': TOOLS})
  deltas = [chunk['choices'][0]['delta'] for chunk in chunks]
  contents = [d['content'] for d in deltas if d.get('content')]
  assert contents == ([] if ends else [text])
  assert any(d.get('tool_calls') for d in deltas) == bool(ends)


async def test_a_stop_string_is_not_shown_but_is_in_the_ids():
  engine = Engine(lambda prompt, sampling: 'one STOP', delay=0.002)
  async with endpoint(engine) as (client, delivered):
    chunks = await events(client, PATH, {**ASK, 'stop': 'STOP'})
    deltas = [c['choices'][0]['delta'].get('content') or '' for c in chunks]
    assert ''.join(deltas) == 'one '
    await post(client, '/feedback', {})
  assert written(delivered['0/'][0]) == 'one STOP'


class Lost(Engine):
  """Dies once it has written some letters of a reply."""

  async def generate(self, request_id, token_ids, sampling):
    try:
      async with asyncio.timeout(0.05):
        return await super().generate(request_id, token_ids, sampling)
    except TimeoutError:
      raise EngineDeadError('it was killed') from None


async def test_a_stream_goes_on_when_its_engine_is_lost():
  text = 'What a long reply this is. ' * 5
  first, second = (
    kind(lambda prompt, sampling: text + END, delay=0.002) for kind in (Lost, Engine)
  )
  router = EngineRouter([first, second], poll_interval=0.005)
  async with endpoint(router) as (client, delivered):
    chunks = await events(client, PATH, ASK)
    await post(client, '/feedback', {})
  deltas = [chunk['choices'][0]['delta'].get('content') or '' for chunk in chunks]
  assert ''.join(deltas) == text and sum(map(bool, deltas)) > 3
  ((_, _, _, sampling),) = second.calls
  assert sampling.num_generated > 0 and not first.calls
  assert written(delivered['0/'][0]) == text + END


async def test_bare_completions_go_on_from_their_ids():
  async with endpoint(says('ab')) as (client, delivered):
    body = {'prompt': 'x', 'max_tokens': 2, 'return_token_ids': True, 'logprobs': 1}
    _, response = await post(client, '/v1/completions', body)
    assert (
      response['object'] == 'text_completion' and response['choices'][0]['text'] == 'ab'
    )
    assert len(response['choices'][0]['logprobs']['token_logprobs']) == 2
    ids = response['prompt_token_ids'] + response['choices'][0]['token_ids'] + [5]
    chunks = await events(client, '/v1/completions', {'prompt': ids, 'max_tokens': 2})
    assert ''.join(c['choices'][0]['text'] for c in chunks) == 'ab'
    await post(client, '/feedback', {'reward': 2})
  (row,) = delivered['0/']
  assert row.action_mask.tolist() == [False, True, True, False, True, True]
  assert row.score == 2


async def test_models():
  async with (
    endpoint(model='tiny') as (client, _),
    client.get('/v1/models') as response,
  ):
    assert [card['id'] for card in (await response.json())['data']] == ['tiny']
    async with client.get('/v1/models/big') as other:
      assert other.status == 404


# ---- sessions and their rewards


async def test_sessions_by_header_and_by_key():
  async with endpoint(says('x' + END)) as (client, delivered):
    for headers in (
      {'x_session_id': 'a'},
      {'Authorization': f'Bearer {KEY}/a'},
      {'Authorization': 'Bearer other/a'},
      {},
    ):
      assert (await post(client, PATH, ASK, **headers))[0] == 200
    assert await post(client, '/feedback', {'reward': 1}, x_session_id='a') == (
      200,
      {'done': True, 'trajectories': 2},
    )
    assert (await post(client, '/feedback', {}, x_session_id='a'))[0] == 404
    await post(client, '/feedback', {}, Authorization='Bearer other/a')
    await post(client, '/v1/feedback', {})
  assert {name: len(rows) for name, rows in delivered.items()} == {
    '0/a': 2,
    '1/a': 1,
    '0/': 1,
  }


async def test_one_reply_can_be_rewarded_before_the_end():
  async with endpoint(says('x' + END)) as (client, delivered):
    _, response = await post(client, PATH, {**ASK, 'n': 2})
    second = response['choices'][1]['completion_id']
    more = {'reward': 0.5, 'completion_id': second, 'done': False}
    assert await post(client, '/feedback', more) == (
      200,
      {'done': False, 'trajectories': 0},
    )
    assert (await post(client, '/feedback', {**more, 'completion_id': 'no'}))[0] == 404
    await post(client, '/feedback', {'reward': 1})
  assert [row.score for row in delivered['0/']] == [1, 1.5]


async def test_full_houses_refuse_or_forget():
  async def statuses(**options):
    async with endpoint(says('x' + END), max_sessions=2, max_replies=2, **options) as (
      client,
      _,
    ):
      return [
        (await post(client, PATH, ASK, x_session_id=name))[0] for name in 'aaabca'
      ]

  assert await statuses() == [200, 200, 429, 200, 429, 429]
  assert await statuses(evict_idle=True) == [200] * 6


# ---- what is refused


@pytest.mark.parametrize('auth', ['', 'Bearer', 'Bearer wrong', f'Basic {KEY}', KEY,
                                  f'Bearer {KEY}x', 'Bearer é'])  # fmt: skip
async def test_nobody_without_a_key(auth):
  async with endpoint() as (client, _):
    for path in (PATH, '/feedback', '/v1/completions', '/nowhere'):
      status, response = await post(client, path, ASK, Authorization=auth)
      assert status == 401 and response['error']['code'] == 'invalid_api_key'


@pytest.mark.parametrize(
  'change, param',
  [
    ({'messages': 'hi'}, 'messages'),
    ({'messages': []}, 'messages'),
    ({'messages': [{'role': 'wizard', 'content': 'x'}]}, 'messages'),
    ({'messages': [{'role': 'user', 'content': [{'type': 'image_url'}]}]}, 'messages'),
    ({'messages': [{'role': 'assistant', 'tool_calls': 5}]}, 'messages'),
    ({'messages': [{'role': 'user', 'content': 'x' * 3000}]}, 'messages'),
    ({'temperature': 'hot'}, 'temperature'),
    ({'temperature': True}, 'temperature'),
    ({'top_p': 0}, 'top_p'),
    ({'max_tokens': 0}, 'max_tokens'),
    ({'max_completion_tokens': 1.5}, 'max_completion_tokens'),
    ({'n': 99}, 'n'),
    ({'stop': ['']}, 'stop'),
    ({'tools': [{'name': 'add'}]}, 'tools'),
    ({'tool_choice': 'required'}, 'tool_choice'),
    ({'logit_bias': {'5': 1}}, 'logit_bias'),
    ({'response_format': {'type': 'json_object'}}, 'response_format'),
    ({'stream_options': 3}, 'stream_options'),
  ],
)
async def test_a_field_at_fault_is_named(change, param):
  engine = Engine()
  async with endpoint(engine) as (client, _):
    status, response = await post(client, PATH, {**ASK, **change})
  assert status == 400 and response['error']['param'] == param, response
  assert response['error']['type'] == 'invalid_request_error'
  assert engine.calls == []


def ask_next(text):
  reply, question = {'role': 'assistant', 'content': 'x'}, {'role': 'user'}
  return {'messages': [*ASK['messages'], reply, {**question, 'content': text}]}


@pytest.mark.parametrize(
  'path, body',
  [
    (PATH, lambda text: {'messages': [{'role': 'user', 'content': text}]}),
    (PATH, ask_next),
    ('/v1/completions', lambda text: {'prompt': text}),
  ],
  ids=['first', 'next', 'bare'],
)
async def test_a_prompt_far_beyond_the_window_is_not_tokenised(path, body, monkeypatch):
  encode, lengths = Tokens.encode, []

  def count(self, text, **options):
    lengths.append(len(text))
    return encode(self, text, **options)

  monkeypatch.setattr(Tokens, 'encode', count)
  engine = says('x' + END)
  async with endpoint(engine) as (client, _):
    assert (await post(client, PATH, ASK))[0] == 200
    errors = []
    for size in (2000, 3_900_000):
      status, payload = await post(client, path, body('y' * size))
      assert status == 400
      payload['error']['message'] = payload['error']['message'].partition(' tokens ')[2]
      errors.append(payload['error'])
    assert errors[0] == errors[1]
    assert errors[0]['message'] == 'leaves no room in the window of 2000'
    assert errors[0]['code'] == 'context_length_exceeded'
    assert (await post(client, PATH, ask_next('z')))[0] == 200
  assert max(lengths) < 20_000
  assert 'y' not in Tokens().decode(engine.calls[-1][1])


@pytest.mark.parametrize(
  'body',
  [
    b'',
    b'[]',
    b'{"messages": NaN}',
    b'{"a": "\\ud800"}',
    pytest.param(b'[' * 10**5, id='deep'),
    b'\xff',
  ],
)
async def test_what_is_not_json(body):
  async with endpoint() as (client, _):
    status, response = await post(client, PATH, body)
  assert status == 400 and response['error']['code'] == 'invalid_json'


@pytest.mark.parametrize('body', [{'reward': 'much'}, {'reward': True},
                                  {'reward': float('nan')}, {'reward': 1e19},
                                  {'rewrad': 1},
                                  {'done': 'yes'}, {'completion_id': 3}])  # fmt: skip
async def test_feedback_is_checked(body):
  async with endpoint(says('x' + END)) as (client, delivered):
    await post(client, PATH, ASK)
    assert (await post(client, '/feedback', body))[0] == 400
  assert delivered == {}


async def test_errors_of_the_path_and_of_the_size_are_json_too():
  async with endpoint(limits={'max_body': 1000}) as (client, _):
    status, payload = await post(client, PATH, {**ASK, 'user': 'x' * 2000})
    assert status == 413 and 'error' in payload
    assert (await post(client, '/nowhere', {}))[0] == 404
    async with client.get(PATH) as response:
      assert response.status == 405 and 'error' in await response.json()
    assert (await post(client, PATH, ASK, x_session_id='a b'))[0] == 400


@pytest.mark.parametrize(
  'error, status',
  [
    (PromptTooLongError('too long'), 400),
    (ValueError('no such sampling'), 400),
    (RuntimeError('secret'), 500),
  ],
)
async def test_an_engine_that_fails_leaves_nothing_behind(error, status):
  engine = says(error)
  async with endpoint(engine) as (client, delivered):
    got, payload = await post(client, PATH, ASK)
    assert got == status and 'secret' not in payload['error']['message']
    is_of_length = payload['error']['code'] == 'context_length_exceeded'
    assert is_of_length == isinstance(error, PromptTooLongError)
    async with client.post(PATH, json={**ASK, 'stream': True}) as response:
      assert '"error"' in await response.text()
    await post(client, '/feedback', {})
  assert delivered == {'0/': []}


class ErrorInAnActor(ValueError):
  """Has the form in which Ray raises what an actor raised."""

  def __init__(self, cause):
    super().__init__('ray::Engine.generate() (pid=1)\n  File "/home/me/engine.py"')
    self.cause = cause


async def test_an_engines_message_is_told_without_traceback_and_paths():
  cause = ValueError('the window of 9 tokens is too short, see /home/me/a.py:3\nFile')
  async with endpoint(says(ErrorInAnActor(cause))) as (client, _):
    status, response = await post(client, PATH, ASK)
  assert status == 400
  message = response['error']['message']
  assert message == 'the engine refuses: the window of 9 tokens is too short, see …:3'


async def silent(client, count):
  """Connections that send nothing."""
  host, port = client._base_url.host, client._base_url.port
  return [await asyncio.open_connection(host, port) for _ in range(count)]


async def ended(connection):
  """Whether the other side has closed."""
  reader, _ = connection
  try:
    return await asyncio.wait_for(reader.read(), 0.01) == b''
  except TimeoutError:
    return False
  except ConnectionError:
    return True


async def test_silent_connections_make_room_for_others():
  limits = ConnectionLimits(max_connections=8, max_per_client=4, min_silence=0)
  async with endpoint(limits={'connections': limits}) as (client, _):
    opened = await silent(client, 12)
    assert (await post(client, PATH, ASK))[0] == 200
    closed = [await ended(one) for one in opened]
    assert closed == [True] * 9 + [False] * 3  # those that were silent for longest
    for _, writer in opened:
      writer.close()


async def test_connections_with_requests_are_not_closed_for_others():
  engine = Engine(lambda prompt, sampling: 'x' * 20 + END, delay=0.01)
  limits = ConnectionLimits(max_connections=8, max_per_client=3, idle_timeout=0.05)
  async with endpoint(engine, limits={'connections': limits}) as (client, _):
    requests = [post(client, PATH, ASK, x_session_id=f's{i}') for i in range(5)]
    responses = await asyncio.gather(*requests)
    assert sorted(status for status, _ in responses) == [200, 200, 200, 503, 503]
    messages = {body['error']['message'] for code, body in responses if code == 503}
    assert messages == {'too many connections; try again later'}
    assert (await post(client, PATH, ASK))[0] == 200


@pytest.mark.parametrize('sent', [b'', b'GET /v1/models HTTP/1.1\r\nHost: a\r\nX: '])
async def test_headers_that_do_not_end_are_not_waited_for(sent):
  limits = ConnectionLimits(header_timeout=0.1)
  async with endpoint(limits={'connections': limits}) as (client, _):
    ((reader, writer),) = await silent(client, 1)
    writer.write(sent)
    with contextlib.suppress(ConnectionError):
      assert await asyncio.wait_for(reader.read(), 5) == b''


async def test_an_idle_connection_is_closed():
  limits = ConnectionLimits(header_timeout=9, idle_timeout=0.1)
  async with endpoint(limits={'connections': limits}) as (client, _):
    ((reader, writer),) = await silent(client, 1)
    request = b'GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %b\r\n\r\n'
    writer.write(request % KEY.encode())
    assert (await reader.readline()).startswith(b'HTTP/1.1 200')
    with contextlib.suppress(ConnectionError):
      await asyncio.wait_for(reader.read(), 5)


async def test_too_many_at_once_are_told_to_wait():
  engine = Engine(lambda prompt, sampling: 'x' * 20 + END, delay=0.01)
  async with endpoint(engine, limits={'max_requests': 2}) as (client, _):
    requests = [post(client, PATH, ASK, x_session_id=f's{i}') for i in range(5)]
    responses = await asyncio.gather(*requests)
    assert sorted(status for status, _ in responses) == [200, 200, 429, 429, 429]
    assert (await post(client, PATH, ASK))[0] == 200


async def test_a_session_is_not_done_while_it_is_being_written_to():
  engine = Engine(lambda prompt, sampling: 'x' * 20 + END, delay=0.01)
  async with endpoint(engine) as (client, delivered):
    under_way = asyncio.ensure_future(post(client, PATH, ASK))
    await asyncio.sleep(0.05)
    assert (await post(client, '/feedback', {'reward': 1}))[0] == 409
    assert (await under_way)[0] == 200
    assert (await post(client, '/feedback', {'reward': 1}))[0] == 200
  assert delivered['0/'][0].score == 1


@pytest.mark.parametrize('stream', [False, True])
async def test_a_client_that_leaves_takes_its_request_along(stream):
  engine = Engine(lambda prompt, sampling: 'x' * 1000 + END, delay=0.01)
  async with endpoint(engine) as (client, delivered):
    with pytest.raises(TimeoutError):
      limit = aiohttp.ClientTimeout(total=0.1)
      async with client.post(
        PATH, json={**ASK, 'stream': stream}, timeout=limit
      ) as got:
        await got.text()
    for _ in range(100):
      if engine.aborted:
        break
      await asyncio.sleep(0.01)
    assert len(engine.aborted) == 1
    await asyncio.sleep(0.02)
    await post(client, '/feedback', {})
  assert delivered == {'0/': []}


async def test_requests_at_once_do_not_overfill_a_session():
  gateway = Gateway(Engine(), ChatTokenizer(Tokens()), max_replies=4)
  ask = GenerationRequest(messages=[{'role': 'user', 'content': 'hi'}], n=2)
  begun = [gateway.start_choices('a', ask) for _ in range(4)]
  results = await asyncio.gather(*begun, return_exceptions=True)
  gateway.close()
  assert [isinstance(one, ApiError) for one in results] == [False, False, True, True]
