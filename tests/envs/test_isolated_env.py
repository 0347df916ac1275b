"""Environments in processes: same play, and a hang or a death costs one episode."""

import sys
import threading

import pytest

from jaxrl.call_strings import ConfigError
from jaxrl.envs.env_registry import env_factory, find_env
from jaxrl.envs.games.frozen_lake_env import FrozenLakeEnv
from jaxrl.envs.isolated_env import EnvProcessError, IsolatedEnv
from jaxrl.rollout.env_manager import EnvManager
from jaxrl.rollout.thread_pool import ThreadPool, make_timeouts
from tests.processes import wait_for_end
from tests.rollout.fakes import FakeEngine, lease, world

MINE = 'tests.envs.faulty:Faulty'


@pytest.fixture
def env():
  env = IsolatedEnv(MINE, {})
  yield env
  env.kill()


def test_it_plays_as_in_process():
  isolated = env_factory('isolated:frozen_lake', {'map_size': 5})()
  plain = FrozenLakeEnv(map_size=5)
  assert isolated.reset(seed=3) == plain.reset(seed=3)
  assert find_env('isolated:frozen_lake') is FrozenLakeEnv
  for action in ('right', 'down', 'what?'):
    assert isolated.step(action) == plain.step(action)
  isolated.kill()


def test_an_error_leaves_the_process_a_death_gets_a_new_one(env):
  first = env.reset(seed=0)[0]
  with pytest.raises(EnvProcessError, match="KeyError: 'broken'"):
    env.step('raise')
  assert env.reset(seed=0)[0] == first
  with pytest.raises(EnvProcessError, match='exit code 7'):
    env.step('die')
  assert env.reset(seed=0)[0] != first
  assert env.step('go')[1] == 1


def test_kill_ends_a_call_under_way(env):
  pid = int(env.reset(seed=0)[0])
  timer = threading.Timer(0.1, env.kill)
  timer.start()
  with pytest.raises(EnvProcessError):
    env.step('hang')
  wait_for_end(pid)


async def test_a_hung_environment_is_killed_and_replaced():
  replies = iter(['hang', 'go'])
  pool = ThreadPool(1)
  shared = world(lambda: IsolatedEnv(MINE, {}), FakeEngine(lambda *_: next(replies)))
  manager = EnvManager(shared, timeouts=make_timeouts(step=0.2))
  (hung,) = await manager.play_episode(lease(), base_seed=0)
  assert hung.stop_reason == 'env_timeout'
  wait_for_end(int(hung.messages[0]['content']))
  (good,) = await manager.play_episode(lease(), base_seed=0)
  assert good.stop_reason == 'finish'
  assert good.messages[0] != hung.messages[0]
  manager._discard_env()
  pool.close()


@pytest.mark.skipif(sys.platform != 'linux', reason='the kernel sets no bound')
def test_one_that_leaks_meets_its_bound_and_not_the_machines():
  env = IsolatedEnv(MINE, {}, memory=256 << 20)
  env.reset(seed=0)
  env.step(f'leak {100 << 20}')
  with pytest.raises(EnvProcessError, match='MemoryError'):
    for _ in range(3):
      env.step(f'leak {100 << 20}')
  env.kill()
  assert env.reset(seed=0)
  env.kill()


def test_one_killed_while_its_process_starts_leaves_none(env, monkeypatch):
  started, start = [], env._start

  def slow():
    started.append(start())
    env.kill()  # as another thread might, before there is a process to kill
    return started[-1]

  monkeypatch.setattr(env, '_start', slow)
  with pytest.raises(EnvProcessError):
    env.reset(seed=0)
  ((process, _),) = started
  process.join(timeout=10)
  assert process.exitcode == -9


def test_no_process_within_a_process(monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: True)
  game = {'id': 'game:Wordle-v0-easy'}
  assert type(env_factory('isolated:gem', game)()).__name__ == 'GemEnv'
  for name, own in (('gem', game), ('isolated:frozen_lake', {})):
    options = {'env_type': name, 'env_config': own, 'tools': 'python'}
    assert env_factory('tool_use', options)
    with pytest.raises(ConfigError, match=f'{name!r} inside already runs'):
      env_factory('isolated:tool_use', options)
