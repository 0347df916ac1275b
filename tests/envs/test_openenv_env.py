"""An environment of OpenEnv over its WebSocket: the package's server, and a bad one."""

import asyncio
import pathlib
import random
import subprocess
import threading

import aiohttp
import pytest
from aiohttp import web

from jaxrl.envs.adapters import openenv_env
from jaxrl.envs.adapters.openenv_env import OpenEnvError
from jaxrl.envs.adapters.openenv_server import OpenEnvServer, OpenEnvServerError
from tests.calls import env_factory
from tests.marks import adapter
from tests.processes import wait_for_end

PYTHON = pathlib.Path(__file__).parents[2] / '.venv-openenv' / 'bin' / 'python'
INSTALLED = adapter('.venv-openenv')
GUESS = pathlib.Path(__file__).with_name('openenv_guess.py')
COMMAND = f'{PYTHON} {GUESS} {{port}}'


def make(**options):
  options = {'start_timeout': 250.0, **options}
  return env_factory('openenv', options)()


@INSTALLED
@pytest.mark.timeout(600)
def test_a_game_of_its_own_server_is_played_and_outlives_a_crash():
  env = make(command=COMMAND, arguments={'high': 20})
  number = random.Random(5).randint(1, 20)
  assert env.reset(seed=5) == ('A number from 1 to 20?', {})
  url = env._server.url
  observation, reward, done, truncated, info = env.step('Hm.\n<answer>21</answer>')
  assert (observation, reward, done, truncated) == ('lower', 0.0, False, False)
  assert env.step('twelve')[0] == 'The answer must be integer.'
  with pytest.raises(OpenEnvError, match='EXECUTION_ERROR: that is too large'):
    env.step('98')
  observation, reward, done, _, info = env.step(f'I say\n{number}')
  assert (observation, reward, done) == ('yes', 1.0, True)
  assert info['metrics']['success'] == info['metrics']['invalid_actions'] == 1
  env.reset(seed=5)
  with pytest.raises(OpenEnvError, match='the connection ended'):
    env.step('97')  # its answer is larger than allowed
  # Two others of the server's two sessions, by its URL; a third finds no place.
  others = [make(url=url.replace('http', 'ws')) for _ in range(3)]
  for other in others[:2]:
    assert other.reset(seed=1)[0] == 'A number from 1 to 9?'
  with pytest.raises(OpenEnvError, match=r"CAPACITY_REACHED.*per='environment'"):
    others[2].reset(seed=1)
  assert others[0].step('{"number": 3}')[0] == 'The answer must be integer.'
  for other in others:
    other.kill()
  env.reset(seed=5)
  with pytest.raises(OpenEnvError):
    env.step('99')
  env.reset(seed=5)
  assert env.step(str(number))[1] == 1
  pid = env._server._process.pid
  assert env._server.url != url
  env.kill()
  wait_for_end(pid)


@INSTALLED
@pytest.mark.timeout(600)
def test_its_own_client_and_ours_see_the_same(tmp_path):
  server = OpenEnvServer([str(PYTHON), str(GUESS), '{port}'], 250)
  try:
    env = make(url=server.url, per='process')
    ours = [env.reset(seed=7)[0], *(env.step(str(n))[:3] for n in (1, 9, 5))]
    env.close()
    program = tmp_path / 'client.py'
    program.write_text(
      'import sys\n'
      'from openenv.core.generic_client import GenericEnvClient\n'
      'with GenericEnvClient(base_url=sys.argv[1]).sync() as env:\n'
      '  print(env.reset(seed=7).observation["text"])\n'
      '  for number in (1, 9, 5):\n'
      '    result = env.step({"number": number})\n'
      '    print(result.observation["text"], result.reward or 0.0, result.done)\n'
    )
    done = subprocess.run(
      [str(PYTHON), str(program), server.url],
      capture_output=True,
      text=True,
      check=True,
    )
    theirs = done.stdout.splitlines()
    assert [ours[0], *(' '.join(map(str, step)) for step in ours[1:])] == theirs
  finally:
    server.kill()


class BadServer:
  """Answers each message with the next of some texts; None: never."""

  def __init__(self, *answers, schema='{}'):
    self.answers, self.schema = list(answers), schema

  def __enter__(self):
    self.loop = asyncio.new_event_loop()
    started = threading.Event()
    self.thread = threading.Thread(target=self._run, args=(started,), daemon=True)
    self.thread.start()
    assert started.wait(20)
    return f'http://127.0.0.1:{self.port}'

  def _run(self, started):
    asyncio.set_event_loop(self.loop)
    self.loop.run_until_complete(self._start())
    started.set()
    self.loop.run_forever()
    self.loop.close()

  async def _start(self):
    app = web.Application()
    app.router.add_get('/ws', self._serve)
    app.router.add_get('/schema', self._tell_schema)
    self.runner = web.AppRunner(app, shutdown_timeout=0.1)
    await self.runner.setup()
    site = web.TCPSite(self.runner, '127.0.0.1', 0)
    await site.start()
    self.port = site._server.sockets[0].getsockname()[1]

  async def _tell_schema(self, request):
    return web.Response(text=self.schema)

  async def _serve(self, request):
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    async for message in socket:
      assert message.type == aiohttp.WSMsgType.TEXT
      answer = self.answers.pop(0)
      if answer is not None:
        await socket.send_str(answer)
    return socket

  def __exit__(self, *_):
    # Tasks that outlive their loop would end inside of whatever test runs by then.
    ended = asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop)
    ended.result(timeout=20)
    self.loop.call_soon_threadsafe(self.loop.stop)
    self.thread.join(timeout=20)


@pytest.mark.parametrize(
  'answer, words',
  [
    ('{', 'is no JSON'),
    ('[1]', 'is no JSON object'),
    ('[' * 100_000, 'is no JSON'),
    ('{"type": "observation"}', 'has no data'),
    ('{"data": {"observation": 3}}', 'has no observation'),
    ('{"data": {"observation": {"a": 1}}}', "has no 'text'"),
    ('{"type": "error", "data": {"message": "no", "code": "C"}}', 'reset: C: no'),
    (None, 'did not answer within timeout=0.5 seconds'),
  ],
)
def test_what_a_bad_server_sends_costs_the_episode(answer, words):
  with BadServer(answer) as url:
    env = make(url=url, timeout=0.5, observation_field='text')
    with pytest.raises(OpenEnvError) as error:
      env.reset(seed=0)
    env.close()
  assert words in str(error.value)


def schema(fields, required):
  kinds = ', '.join(f'"{name}": {{"type": "{kind}"}}' for name, kind in fields.items())
  names = ', '.join(f'"{name}"' for name in required)
  return f'{{"action": {{"properties": {{{kinds}}}, "required": [{names}]}}}}'


@pytest.mark.parametrize(
  'form, required, replies',
  [
    ({'say': 'string'}, ['say'], {'hello': {'say': 'hello'}}),
    ({'x': 'number'}, ['x'], {'2': {'x': 2}, '2.5': {'x': 2.5}, 'true': None}),
    ({'x': 'boolean'}, ['x'], {'true': {'x': True}, '1': None}),
    ({'a': 'string', 'b': 'array'}, ['a', 'b'], {'{"a": "x"}': {'a': 'x'}, '[]': None}),
  ],
)
def test_the_schema_says_what_an_action_is(form, required, replies):
  state = '{"data": {"observation": {"text": "go", "n": 1}}}'
  answers = [state] * 9
  with BadServer(*answers, schema=schema(form, required)) as url:
    env = make(url=url)
    assert env.reset(seed=0)[0] == '{"text": "go", "n": 1}'
    for reply, action in replies.items():
      payload, problem = env._read_action(reply)
      assert (payload, bool(problem)) == (action or {}, action is None), reply
    assert 'at most' in env._read_action('x' * 30_000)[1]
    with pytest.raises(OpenEnvError, match="actions have no 'z', but"):
      make(url=url, action_field='z').reset(seed=0)


@pytest.mark.parametrize('reward', ['NaN', '1e999'])
def test_a_reward_that_is_no_number_is_an_error(reward):
  state = f'{{"data": {{"observation": {{"text": "go"}}, "reward": {reward}}}}}'
  with BadServer(state, state) as url:
    env = make(url=url)
    env.reset(seed=0)
    with pytest.raises(OpenEnvError, match='sent the reward'):
      env.step('{}')


@pytest.mark.parametrize(
  'options, words',
  [
    ({}, 'set either url'),
    ({'url': 'http://x', 'command': 'python {port}'}, 'set either url'),
    ({'url': 'ftp://x'}, 'must begin with http:// or ws://'),
    ({'command': 'nothing-there {port}'}, "there is no program 'nothing-there'"),
    ({'command': 'true'}, "must contain '{port}'"),
    ({'command': "true '"}, 'No closing quotation'),
    ({'url': 'http://x', 'timeout': 0.0}, 'must be positive'),
    ({'url': 'http://x', 'key_variable': 'NO_SUCH_KEY'}, '$NO_SUCH_KEY is not set'),
  ],
)
def test_options_are_checked_before_anything_starts(options, words):
  with pytest.raises(ValueError) as error:
    env_factory('openenv', options)()
  assert words in str(error.value)


def test_a_server_that_does_not_start_is_told_of():
  with pytest.raises(OpenEnvServerError, match='ended with status 3: no luck'):
    make(command="sh -c 'echo no luck; exit 3; {port}'").reset(seed=0)
  with pytest.raises(OpenEnvServerError, match=r'within start_timeout=0\.3 seconds'):
    make(command='sleep 60{port}', start_timeout=0.3).reset(seed=0)
  with pytest.raises(OpenEnvError, match='Cannot connect to host'):
    make(url='http://127.0.0.1:9').reset(seed=0)


def test_a_process_shares_its_server(monkeypatch):
  started = []

  class Started:
    alive = True

    def __init__(self, parts, start_timeout):
      started.append(parts)
      self.url = f'http://127.0.0.1:{len(started)}'

  monkeypatch.setattr(openenv_env, 'OpenEnvServer', Started)
  monkeypatch.setattr(openenv_env, '_servers', {})
  envs = [make(command='true {port}', per='process') for _ in range(2)]
  assert len({env._find_server() for env in envs}) == 1 == len(started)
