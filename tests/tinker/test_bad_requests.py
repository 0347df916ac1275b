"""Whatever a client sends, the server says what is wrong, logs a line and goes on."""

import asyncio
import itertools
import json
import logging
import random
from urllib.parse import quote

import aiohttp
import msgspec
import numpy as np
import pytest

from jaxrl.rollout.tinker import request_bodies
from jaxrl.rollout.tinker.pending_results import PendingResult
from jaxrl.rollout.tinker.tenant_learner import TrainingRow
from jaxrl.rollout.tinker.tinker_options import TinkerOptions
from jaxrl.rollout.tinker.tinker_server import TinkerServer
from launch.tinker import serve_tinker
from tests.rollout.gateway import broken_http

KEY = {'X-API-Key': 'tml-key'}
SIZES = {'max_length': 64, 'step_tokens': 64, 'max_rank': 4, 'max_tenants': 1}
SIZES |= {'max_samplers': 1, 'max_num_seqs': 2, 'poll_seconds': 5.0, 'max_body': 65536}
RAW = (
  *(
    b'',
    b'{',
    b'null',
    b'[]',
    b'"x"',
    b'7',
    b'{"a": 1}',
    b'\xff\xfe\x00',
    b'\x00' * 64,
  ),
  *(b'[' * 5000, b'{"type":' * 3000, b'\x0a\xff\xff\xff\xff\x0f', b'x' * 70000),
)
# JSON values of every kind, and numbers, names and paths that mean nothing.
VALUES = (
  *(None, True, -1, 0, 7, 2**63, -(2**70), 1e308, 0.5, '', 'x', 'é\ud800', 'a' * 3000),
  *([], [[]], [1, 'x'], {}, {'type': 'x'}, {'a': {'b': [None]}}),
  *(
    'tinker://',
    'tinker://a/weights/../b',
    'tinker://a:b/sampler_weights/c',
    '..',
    '/',
  ),
)
STRUCTS = [
  value
  for value in vars(request_bodies).values()
  if isinstance(value, type) and issubclass(value, msgspec.Struct)
]


def bodies(rng, session_id, number):
  """JSON bodies with fields of the API's requests and values of any kind."""
  for _ in range(number):
    kind = rng.choice(STRUCTS)
    body = {field: rng.choice(VALUES) for field in kind.__struct_fields__}
    body |= {'session_id': session_id} if rng.random() < 0.7 else {}
    for field in rng.sample(sorted(body), rng.randint(0, len(body))):
      if field != 'session_id':
        del body[field]
    yield json.dumps(body).encode()


def tuned(session_id, base_model):
  """Bodies that are right but for one value."""
  right = {
    'create_model': {
      'session_id': session_id,
      'model_seq_id': 0,
      'base_model': base_model,
      'lora_config': {'rank': 2},
    },
    'asample': {
      'prompt': {'chunks': [{'type': 'encoded_text', 'tokens': [1, 2]}]},
      'sampling_params': {'max_tokens': 1},
    },
    'optim_step': {'model_id': f'{session_id}:train:0', 'seq_id': 1},
    'create_sampling_session': {'session_id': session_id, 'sampling_session_seq_id': 0},
    'create_session': {'sdk_version': 'x'},
    'copy_weights': {'source_path': 'tinker://a/weights/b'},
    'sessions/search': {'limit': 2},
    'load_weights': {'path': 'tinker://a/weights/b', 'optimizer': True},
    'create_custom_loss': {
      'session_id': session_id,
      'custom_loss_seq_id': 0,
      'name': 'x',
      'inputs': [],
      'graph': {'nodes': []},
    },
  }
  for path, body in right.items():
    yield path, body
    for field in body:
      for value in VALUES:
        yield path, {**body, field: value}


class Sender:
  """Sends requests, and checks that each answer is one of the API's."""

  def __init__(self, http, url):
    self.http, self.url = http, url
    self.statuses = []

  async def send(self, method, path, data=None, headers=KEY):
    async with self.http.request(
      method, self.url + path, data=data, headers=headers
    ) as reply:
      text = await reply.text()
      self.statuses.append(reply.status)
      where = method, path, data and data[:200], reply.status, text[:300]
      # 408 asks to poll again, and is none of these requests' business.
      assert reply.status in (200, 400, 401, 403, 404, 405, 408, 410, 413, 429), where
      answer = json.loads(text)
      if reply.status not in (200, 408) and not path.startswith('/v1/'):
        assert len(answer['detail']) > 10, where
      return answer

  async def result(self, answer):
    """Waits for a request's result; it may be an error that was foreseen."""
    body = json.dumps({'request_id': answer['request_id']}).encode()
    async with self.http.post(
      f'{self.url}/api/v1/retrieve_future', data=body, headers=KEY
    ) as reply:
      if reply.content_type == 'application/json':
        found = await reply.json()
        assert not found.get('error', '').startswith('the server failed'), found
        return found


@pytest.fixture
def served(checkpoint, tmp_path, monkeypatch):
  """Runs a coroutine function with a sender, and the server that it sends to."""
  made = []
  serve = TinkerServer.serve

  def noted(self, *args):
    made.append(self)
    return serve(self, *args)

  monkeypatch.setattr(TinkerServer, 'serve', noted)

  def run(work):
    async def main():
      options = TinkerOptions(**SIZES)
      async with (
        serve_tinker(str(checkpoint), tmp_path, options, 'tml-key') as url,
        aiohttp.ClientSession() as http,
      ):
        sender = Sender(http, url)
        await work(sender, made[0])
        health = await sender.send('GET', '/api/v1/healthz')
        assert health == {'status': 'ok'}
        return sender

    return asyncio.run(main())

  return run


def check_log(caplog, sender):
  """Every refusal has a line, and no line has a traceback."""
  assert not [r for r in caplog.records if r.exc_info or r.levelno >= logging.ERROR]
  lines = [r for r in caplog.records if r.name.endswith(('_server', '_endpoint'))]
  refused = [status for status in sender.statuses if status not in (200, 408)]
  assert len(lines) >= len(refused) > 100


def test_any_body_on_any_route(served, caplog, checkpoint):
  caplog.set_level(logging.INFO)
  rng = random.Random(2)

  async def work(sender, server):
    session = await sender.send(
      'POST', '/api/v1/create_session', b'{"sdk_version": "x"}'
    )
    for route in server.app.router.routes():
      if route.method == 'HEAD':  # as GET, without the answer
        continue
      path = route.resource.canonical
      methods = ('GET', 'POST') if route.method == '*' else (route.method,)
      junk = rng.choice(('x', 'a:b', '%00', '..%2f', 'é', 'a' * 300, '9' * 40))
      for name in route.resource.canonical.split('{')[1:]:
        path = path.replace('{' + name.partition('}')[0] + '}', junk)
      path = path.replace('{rest:.*}', 'responses')
      for method in methods:
        fuzzed = bodies(rng, session['session_id'], 10)
        for data in (*RAW, *fuzzed) if method in ('POST', 'PUT') else (None, b'{'):
          await sender.send(method, path, data)
        for query in ('limit=x', 'limit=0', 'offset=-1', f'offset={10**30}'):
          await sender.send(method, f'{path}?{query}')
      assert await sender.send(methods[0], path, headers={})

  check_log(caplog, served(work))


@pytest.mark.slow
def test_one_wrong_value_in_a_request_that_is_right(served, caplog, checkpoint):
  caplog.set_level(logging.INFO)

  async def work(sender, server):
    session = await sender.send(
      'POST', '/api/v1/create_session', b'{"sdk_version": "x"}'
    )
    for path, body in tuned(session['session_id'], str(checkpoint)):
      data = json.dumps(body).encode()
      answer = await sender.send('POST', f'/api/v1/{path}', data)
      if 'request_id' in answer:
        await sender.result(answer)

  check_log(caplog, served(work))


def test_a_step_is_not_taken_with_what_is_left_of_its_gradients(served, checkpoint):
  """A request that fails on the device takes those before it along; all is said."""
  rows = [TrainingRow(np.arange(8, dtype=np.int32), np.ones((8, 1), np.int32))]

  async def work(sender, server):
    answer = await sender.send(
      'POST', '/api/v1/create_session', b'{"sdk_version": "x"}'
    )
    body = {'session_id': answer['session_id'], 'model_seq_id': 0}
    body |= {'base_model': str(checkpoint), 'lora_config': {'rank': 2}}
    answer = await sender.send(
      'POST', '/api/v1/create_model', json.dumps(body).encode()
    )
    run_id = (await sender.result(answer))['model_id']
    training = server._training
    compute = training._learner.run
    numbers = itertools.count(1)

    async def add():
      result = PendingResult('rows', '')
      training.queue.add_rows(run_id, next(numbers), result, rows, backward=True)
      await result.done.wait()
      return result.failed

    async def step():
      body = {'model_id': run_id, 'seq_id': next(numbers)}
      data = json.dumps(body).encode()
      return await sender.result(await sender.send('POST', '/api/v1/optim_step', data))

    def fail(*args, **options):
      training._learner.run = compute
      raise RuntimeError('out of memory')

    assert not await add()
    training._learner.run = fail
    assert await add() and not await add()
    answer = await step()
    assert 'were dropped' in answer['error'] and answer['category'] == 'server'
    assert 'no gradients' in (await step())['error']
    assert not await add() and (await step())['metrics']

  served(work)


def test_what_is_no_http(served, caplog):
  caplog.set_level(logging.INFO)
  key = 'X-API-Key: tml-key'

  async def work(sender, server):
    for path in ('/api/v1/create_session', '/api/v1/forward_backward', '/v1/responses'):
      own = 'Authorization: Bearer tml-key' if path.startswith('/v1') else key
      for name, data, statuses in broken_http.requests('POST', path, own):
        caplog.clear()
        status, _ = await broken_http.send(sender.url, data)
        assert status in statuses, (path, name, status)
        assert status == 200 or name == 'expectation' or caplog.records, name
        broken_http.check_log(caplog.records)

  served(work)


def test_texts_that_are_no_utf8(served):
  auth = {'Authorization': 'Bearer tml-key'}
  broken = b'{"sdk_version": "\xff", "model_id": "\xff", "model": "\xff"}'

  async def work(sender, server):
    for path in ('create_session', 'get_info', 'optim_step'):
      answer = await sender.send('POST', f'/api/v1/{path}', broken)
      assert sender.statuses[-1] == 400 and 'utf-8' in answer['detail']
    for path in ('chat/completions', 'responses', 'messages', 'completions'):
      answer = await sender.send('POST', f'/v1/{path}', broken, auth)
      assert sender.statuses[-1] == 400 and 'utf-8' in answer['error']['message']
    # A mark of the byte order is none of the text, and the model is read after it.
    data = b'\xef\xbb\xbf{"model": "tinker://a/sampler_weights/b", "prompt": "x"}'
    await sender.send('POST', '/v1/completions', data, auth)
    assert sender.statuses[-1] == 404

  served(work)


def test_a_body_that_does_not_end_is_not_waited_for(served, monkeypatch):
  monkeypatch.setitem(SIZES, 'body_timeout', 0.3)
  slow = b'POST /api/v1/optim_step HTTP/1.1\r\nHost: x\r\nX-API-Key: tml-key\r\n'

  async def work(sender, server):
    data = slow + b'Content-Length: 99\r\n\r\n{'
    assert (await broken_http.send(sender.url, data))[0] == 408

  served(work)


def test_the_other_apis_answer_errors_in_their_own_form(served, checkpoint):
  """Without the key nobody learns which model or checkpoint there is."""
  auth = {'Authorization': 'Bearer tml-key'}
  messages = [{'role': 'user', 'content': 'x'}]
  lost = json.dumps({'model': 'tinker://a/sampler_weights/b', 'messages': messages})

  async def work(sender, server):
    for path in ('chat/completions', 'responses', 'messages', 'completions'):
      answer = await sender.send('POST', f'/v1/{path}', lost.encode(), {})
      assert sender.statuses[-1] == 401 and 'sampler_weights' not in str(answer)
      answer = await sender.send('POST', f'/v1/{path}', lost.encode(), auth)
      assert sender.statuses[-1] == 404
      kind = answer['error']['type']
      assert kind == 'not_found_error'
      assert ('type' in answer) == (path == 'messages')
    name = quote(str(checkpoint), safe='')
    found = await sender.send('GET', f'/v1/models/{name}', headers=auth)
    assert found['id'] == str(checkpoint)
    await sender.send('GET', '/v1/models/other', headers=auth)
    assert sender.statuses[-1] == 404

  served(work)


def test_what_is_not_there_is_said(served):
  async def work(sender, server):
    answer = await sender.send('POST', '/api/v1/fine_tune', b'{}')
    assert answer['detail'].startswith('this server has no POST /api/v1/fine_tune')
    answer = await sender.send('GET', '/api/v1/create_model')
    assert answer['detail'].startswith('this server has no GET /api/v1/create_model')

  assert served(work).statuses[:2] == [404, 405]
