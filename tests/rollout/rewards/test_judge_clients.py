"""Who answers a judge: an engine, or a server over HTTP with retries and limits."""

import contextlib

import pytest
from aiohttp import web

from jaxrl.rollout.rewards.judge_clients import (
  LocalJudgeClient,
  OpenAIJudgeClient,
  read_api_key,
  validate_judge_url,
)
from jaxrl.rollout.rewards.reward_pipeline import ScoringError
from jaxrl.types import Completion
from tests.rollout.fakes import FakeChat, FakeEngine, completion

MESSAGES = [{'role': 'user', 'content': 'How good?'}]
SAMPLING = {'seed': 3, 'temperature': 0.5, 'max_tokens': 8}


class Server:
  """Gives its answers in turn, the last one for ever; keeps what it was sent."""

  def __init__(self, *answers):
    self.answers, self.seen, self.keys = list(answers), [], []

  async def chat(self, request):
    self.seen.append(await request.json())
    self.keys.append(request.headers.get('Authorization'))
    answer = self.answers[min(len(self.seen), len(self.answers)) - 1]
    return answer() if callable(answer) else web.json_response(answer)

  @contextlib.asynccontextmanager
  async def serve(self):
    app = web.Application()
    app.add_routes([web.post('/v1/chat/completions', self.chat)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, '127.0.0.1', 0)
    await site.start()
    try:
      yield f'http://127.0.0.1:{runner.addresses[0][1]}/v1'
    finally:
      await runner.cleanup()


def says(text):
  return {'choices': [{'message': {'role': 'assistant', 'content': text}}]}


def status(code):
  return lambda: web.Response(status=code, text='told why')


async def test_a_server_is_asked_as_openai_has_it():
  server = Server(says('Score: 4'))
  async with server.serve() as url:
    endpoint = OpenAIJudgeClient(f'{url}/', 'm', 'secret')
    assert await endpoint.ask('a', MESSAGES, **SAMPLING) == 'Score: 4'
    assert (
      await OpenAIJudgeClient(url, 'm').ask('a', MESSAGES, **SAMPLING) == 'Score: 4'
    )
  assert server.seen[0] == {'model': 'm', 'messages': MESSAGES, **SAMPLING}
  assert server.keys == ['Bearer secret', None]


async def test_what_may_pass_is_tried_again_and_what_may_not_is_told():
  server = Server(status(503), status(429), says('fine'))
  async with server.serve() as url:
    endpoint = OpenAIJudgeClient(url, 'm', pause=0.001)
    assert await endpoint.ask('a', MESSAGES, **SAMPLING) == 'fine'
    assert len(server.seen) == 3
    for answers, count, message in (
      ([status(500)], 3, 'status 500: told why (request a, 3 tries)'),
      ([status(401)], 1, 'status 401: told why (request a, 1 tries)'),
      ([status(307)], 1, 'status 307'),
      ([{'choices': []}], 1, 'its answer is not a chat completion: IndexError'),
      ([says(None)], 1, 'its answer has a content of type NoneType'),
      (
        [lambda: web.Response(text='[' * 99999)],
        1,
        'its answer is not a chat completion',
      ),
    ):
      server.answers, server.seen = answers, []
      with pytest.raises(ScoringError) as caught:
        await OpenAIJudgeClient(url, 'm', retries=2, pause=0.001).ask(
          'a', MESSAGES, **SAMPLING
        )
      assert message in str(caught.value)
      assert len(server.seen) == count
  with pytest.raises(ScoringError, match='ClientConnectorError'):  # the server is gone
    await OpenAIJudgeClient(url, 'm', retries=1, pause=0.001).ask(
      'a', MESSAGES, **SAMPLING
    )


async def test_an_answer_too_large_is_not_read_to_its_end():
  server = Server(lambda: web.Response(body=bytes(5 << 20)))
  async with server.serve() as url:
    with pytest.raises(ScoringError, match='an answer of more than 4194304 bytes'):
      await OpenAIJudgeClient(url, 'm', retries=0).ask('a', MESSAGES, **SAMPLING)


def test_urls_and_keys(monkeypatch):
  for url in ('127.0.0.1:8000/v1', 'file:///v1', 'http://', ''):
    with pytest.raises(ValueError, match='write http://HOST:PORT/v1'):
      validate_judge_url(url)
  with pytest.raises(ValueError, match='a key does not belong in the url'):
    validate_judge_url('http://me:key@host/v1')
  monkeypatch.setenv('JUDGE_KEY', 'secret')
  assert (read_api_key('JUDGE_KEY'), read_api_key('')) == ('secret', '')
  monkeypatch.delenv('JUDGE_KEY')
  with pytest.raises(
    ValueError, match="key_env='JUDGE_KEY': this environment variable is not"
  ):
    read_api_key('JUDGE_KEY')


async def test_an_engine_answers_and_is_interrupted():
  engine = FakeEngine(lambda prompt, sampling: 'Score: 4')
  speaker = LocalJudgeClient(engine, FakeChat(), timeout=30.0, concurrency=1)
  assert (
    await speaker.ask('a', MESSAGES, **{**SAMPLING, 'max_tokens': 20}) == 'Score: 4'
  )
  _, prompt, sampling = engine.requests[0]
  assert prompt == FakeChat().encode_prompt(MESSAGES)
  assert (sampling.seed, sampling.temperature) == (3, 0.5)
  parts: list[Completion] = [completion([ord('a')], 'abort'), completion([98, 0])]
  engine = FakeEngine(lambda prompt, sampling: parts.pop(0))
  speaker = LocalJudgeClient(engine, FakeChat(), timeout=30.0, concurrency=1)
  assert await speaker.ask('a', MESSAGES, **SAMPLING) == 'ab'


async def test_an_engine_that_never_answers_is_given_up():
  engine = FakeEngine(delay=60.0)
  speaker = LocalJudgeClient(engine, FakeChat(), timeout=0.05, concurrency=1)
  with pytest.raises(ScoringError, match=r'gave no answer in 0\.05 s'):
    await speaker.ask('a', MESSAGES, **SAMPLING)
  assert engine.aborted == ['a/0']
