"""Environments of verifiers through the endpoint, with the package itself."""

import asyncio
import json
import os
import pathlib
import subprocess

import pytest

from jaxrl.data.chat_tokenizer import ChatTokenizer
from jaxrl.data.seeds import fold_seed
from jaxrl.envs.adapters import verifiers_env
from jaxrl.rollout.env_manager import EnvContext
from jaxrl.rollout.env_worker import make_env_manager
from jaxrl.rollout.gateway.agent_endpoint import AgentEndpoint
from jaxrl.rollout.queue.group_state import EpisodeLease
from jaxrl.rollout.thread_pool import ThreadPool, Timeouts
from tests.calls import env_factory
from tests.envs.verifiers_taskset import reply, write_taskset
from tests.marks import adapter
from tests.processes import wait_for_end
from tests.rollout.gateway.agents import KEY, Engine, Tokens, endpoint
from tests.rollout.gateway.test_concurrent_agents import check

PYTHON = pathlib.Path(__file__).parents[2] / '.venv-verifiers' / 'bin' / 'python'
INSTALLED = adapter('.venv-verifiers')
NULL = {'agent': {'harness': {'id': 'null'}}}


@pytest.fixture
def with_uv(monkeypatch):
  """Puts uv on the PATH, with which verifiers prepares the harness's program."""
  monkeypatch.setenv('PATH', f'{PYTHON.parent}{os.pathsep}{os.environ["PATH"]}')


def world(engine, taskset, **options):
  options = {'python': str(PYTHON), 'arguments': NULL, **options}
  chat = ChatTokenizer(Tokens())
  return EnvContext(
    make_env=env_factory('verifiers', {'taskset': str(taskset), **options}),
    engine=engine,
    chat=chat,
    pool=ThreadPool(8),
    queue=None,
    dataset=None,
    endpoint=AgentEndpoint(engine, chat),
  )


async def play(context, episode, **options):
  options = {'max_steps': 6, 'max_tokens_per_step': 200, 'tag': 'sums', **options}
  options |= {'max_length': 2000, 'timeouts': Timeouts(reset=250, step=250)}
  manager = make_env_manager(context, **options)
  return await manager.play_episode(EpisodeLease(0, episode, 0, 0, 0), base_seed=10)


async def evaluate(folder, tmp_path):
  """The rewards of verifiers' own evaluation of the first two tasks, by task."""
  async with endpoint(Engine(reply)) as (http, _):
    flags = ['--env.agent.harness.id', 'null', '--env.agent.runtime.type', 'subprocess']
    flags += ['-n', '2', '--no-push', '--no-rich', '-o', str(tmp_path / 'eval')]
    url = str(http._base_url).rstrip('/')
    flags += ['--client.base-url', f'{url}/v1', '--run.name', 'own']
    flags += ['--client.api-key-var', 'OWN_API_KEY', '-m', 'policy']
    process = await asyncio.create_subprocess_exec(
      *(str(PYTHON.parent / 'vf-eval'), 'sums', *flags),
      env={**os.environ, 'OWN_API_KEY': KEY, 'PYTHONPATH': str(folder.parent)},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
    )
    output, _ = await process.communicate()
  (file,) = (tmp_path / 'eval').glob('**/traces.jsonl')
  episodes = [json.loads(line) for line in file.read_text().splitlines()]
  assert process.returncode == 0 and len(episodes) == 2, output[-2000:]
  rewards = {}
  for episode in episodes:
    (trace,) = episode['traces']
    rewards[episode['task']['data']['idx']] = sum(
      reward['score'] * reward['weight'] for reward in trace['rewards'].values()
    )
  return rewards


@INSTALLED
@pytest.mark.timeout(600)
async def test_rewards_equal_its_own_evaluation_and_a_crash_costs_one_episode(
  tmp_path, with_uv
):
  folder = write_taskset(tmp_path)
  engine = Engine(reply)
  context = world(engine, folder)
  # The first three episodes that play different tasks.
  episodes = {fold_seed(10 + i, 0) % 3: i for i in reversed(range(20))}
  try:
    played = await asyncio.gather(*(play(context, i) for i in episodes.values()))
  finally:
    await context.close()
  tasks = dict(zip(episodes, played, strict=True))
  own = await evaluate(folder, tmp_path)
  assert own == {0: 1.5, 1: 0.0}
  for task, reward in own.items():
    (row,) = tasks[task]
    assert (row.stop_reason, row.score) == ('finish', reward)
    assert row.columns['task_index'] == task
    assert row.metrics['reward/agent'] == reward
    assert row.metrics['reward/used_tool'] == (0.5 if task == 0 else 0)
    assert row.metrics['letters'] == len(row.columns['given'])
  assert {row.stop_reason for row in tasks[2]} == {'env_error'}
  assert "the episode's process ended with 3" in tasks[2][0].extras['error']
  # The trained tokens are those that the engine got and returned.
  crashed = str(tasks[2][0].episode_id)
  engine.calls = [call for call in engine.calls if call[0].split('/')[2] != crashed]
  check(engine, {'sums': [row for task in own for row in tasks[task]]})


@INSTALLED
@pytest.mark.timeout(600)
async def test_a_killed_episode_leaves_no_process(tmp_path, with_uv):
  folder = write_taskset(tmp_path)
  engine = Engine(reply, delay=30)
  context = world(engine, folder)
  try:
    playing = asyncio.create_task(play(context, 0))
    while not engine.now:
      await asyncio.sleep(0.1)
    tools = [
      int(path.name)
      for path in pathlib.Path('/proc').glob('[0-9]*')
      if str(folder.parent).encode() in _environment(path) and path.name != 'self'
    ]
    assert len(tools) >= 2  # the harness's program and the server of its tool
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
  finally:
    await context.close()
  for pid in tools:
    wait_for_end(pid)


def _environment(path):
  try:
    command = (path / 'cmdline').read_bytes()
    is_worker = b'verifiers_worker' in command
    return b'' if is_worker else (path / 'environ').read_bytes()
  except OSError:
    return b''


@INSTALLED
@pytest.mark.parametrize(
  'options, words',
  [
    ({'taskset': 'no_such_module'}, "taskset 'no_such_module' not found"),
    ({'taskset': './nowhere/tasks.py'}, 'there is no such file'),
    ({'arguments': {}}, "the harness 'bash' of 'agent' runs what the model writes"),
    ({'arguments': {'agnt': {}}}, 'agnt'),
    ({'arguments': {**NULL, 'retries': {'max_retries': 2}}}, 'leave retries out'),
  ],
)
@pytest.mark.timeout(600)
def test_what_is_wrong_is_said_in_words(tmp_path, options, words):
  folder = write_taskset(tmp_path)
  options = {'taskset': str(folder), 'arguments': NULL, **options}
  env = env_factory('verifiers', {'python': str(PYTHON), **options})()
  with pytest.raises(ValueError, match='taskset cannot be loaded') as error:
    env.reset(seed=0)
  assert words in str(error.value)


@pytest.mark.parametrize(
  'options, words',
  [
    ({}, "option 'taskset' must name"),
    ({'taskset': 'x', 'python': 'no/such/python'}, 'pip install verifiers'),
    ({'taskset': 'x', 'python': 'true'}, "python='true': has no verifiers"),
    ({'taskset': 'x'}, "the environment 'verifiers' needs verifiers"),
    ({'taskset': 'x', 'memory_gib': -1.0}, 'memory_gib must not be negative'),
    ({'taskset': 'x', 'arguments': {'a': {1, 2}}}, 'must be JSON'),
    ({'taskset': 'x', 'arguments': {'a': 'a' * 99_999}}, 'at most 65536 bytes'),
  ],
)
def test_options_are_checked_before_anything_starts(monkeypatch, options, words):
  monkeypatch.setattr(
    verifiers_env, '_has_verifiers', lambda python: False if python else None
  )
  with pytest.raises(ValueError) as error:
    env_factory('verifiers', options)
  assert words in str(error.value)
