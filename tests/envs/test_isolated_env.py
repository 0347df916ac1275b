"""Environments in processes: same play, and a hang or a death costs one episode."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxrl.envs import isolated_env
from jaxrl.envs.env_registry import env_factory, find_env
from jaxrl.envs.games.frozen_lake_env import FrozenLakeEnv
from jaxrl.envs.graders.grader_processes import MAX_ANSWER_BYTES
from jaxrl.envs.isolated_env import EnvProcessError, IsolatedEnv
from jaxrl.envs.isolated_worker import MAX_OBSERVATION_CHARS
from jaxrl.options import ConfigError
from jaxrl.rollout.env_manager import EnvManager
from jaxrl.rollout.thread_pool import ThreadPool, Timeouts
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
  manager = EnvManager(shared, timeouts=Timeouts(step=0.2))
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
  assert process.wait(timeout=10) != 0


def test_a_long_observation_is_cut_before_it_is_sent(env):
  env.reset(seed=0)
  observation, *rest = env.step(f'say {MAX_OBSERVATION_CHARS + 100}')
  assert (len(observation), rest) == (MAX_OBSERVATION_CHARS, [0.0, False, False, {}])


def test_an_answer_that_is_too_large_is_an_error_on_either_side(env, monkeypatch):
  env.reset(seed=0)
  with pytest.raises(EnvProcessError, match='bytes besides a long observation'):
    env.step(f'note {MAX_ANSWER_BYTES}')
  assert env.step('go')[1] == 1  # the process is none the worse
  monkeypatch.setattr(isolated_env, 'MAX_ANSWER_BYTES', 1000)
  with pytest.raises(EnvProcessError, match='sent more than 1000 bytes'):
    env.step('say 5000')  # as if the other side did not cut
  assert env.reset(seed=0)


def _read_pids(file):
  until = time.monotonic() + 60
  while not (file.exists() and file.read_text().endswith('\n')):
    assert time.monotonic() < until
    time.sleep(0.02)
  return [int(pid) for pid in file.read_text().split()]


@pytest.mark.skipif(sys.platform != 'linux', reason='only Linux has subreapers')
def test_all_that_a_hung_one_has_started_ends_with_it(env, tmp_path):
  file = tmp_path / 'pids'
  env.reset(seed=0)

  def hang():
    with pytest.raises(EnvProcessError):
      env.step(f'start children and hang {file}')

  thread = threading.Thread(target=hang)
  thread.start()
  pids = _read_pids(file)
  env.kill()
  for pid in pids:
    wait_for_end(pid, 10)
  thread.join()


@pytest.mark.skipif(sys.platform != 'linux', reason='only Linux has subreapers')
def test_all_ends_when_the_process_that_steps_it_is_killed(tmp_path):
  file = tmp_path / 'pids'
  code = f"""
from jaxrl.envs.isolated_env import IsolatedEnv
env = IsolatedEnv({MINE!r}, {{}})
env.reset(seed=0)
env.step('start children and hang {file}')
"""
  parent = subprocess.Popen([sys.executable, '-c', code])
  pids = _read_pids(file)
  os.kill(parent.pid, signal.SIGKILL)
  assert parent.wait() == -9
  for pid in pids:
    wait_for_end(pid, 10)


@pytest.mark.skipif(sys.platform != 'linux', reason='only Linux has this signal')
def test_it_ends_when_its_supervisor_is_killed(env, tmp_path):
  pid = int(env.reset(seed=0)[0])
  os.kill(env._child[0].pid, signal.SIGKILL)
  wait_for_end(pid, 10)
  with pytest.raises(EnvProcessError, match='exit code -9'):
    env.step('go')


def test_no_process_within_a_process(monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: True)
  game = {'id': 'game:Wordle-v0-easy'}
  assert type(env_factory('isolated:gem', game)()).__name__ == 'GemEnv'
  for name, config in (('gem', game), ('isolated:frozen_lake', {})):
    options = {'env_type': name, 'env_config': config, 'tools': 'python'}
    assert env_factory('tool_use', options)
    with pytest.raises(ConfigError, match=f'{name!r} inside already runs'):
      env_factory('isolated:tool_use', options)
