"""Real processes that die, hang or leak: workers and environments, killed at work."""

import asyncio
import collections
import itertools
import os
import signal

from jaxrl.envs.isolated_env import IsolatedEnv
from jaxrl.rollout.env_worker import EnvWorker, partition_envs
from jaxrl.rollout.queue.group_queue import GroupQueue, QueueOptions
from jaxrl.rollout.thread_pool import ThreadPool, Timeouts
from tests.rollout.fakes import FakeEngine, world
from tests.rollout.far_worker import FarWorker
from tests.simulation.load import Book

LIMIT = 60.0  # seconds, far more than any of this takes


async def test_workers_killed_at_work_lose_no_episode_and_double_none():
  queue = Book(num_groups=6, group_size=3, num_env_groups=6)
  parts = partition_envs(6, 3, 2)
  listener = asyncio.create_task(queue.listen())
  # A step is 18 requests to each; these answer a few of steps 2 and 5, and then hang.
  workers = [FarWorker(queue, parts[0], 39), FarWorker(queue, parts[1], 93)]
  groups, ended = [], []
  async with asyncio.timeout(LIMIT):
    for step in range(8):
      await queue.advance_step(step)
      if step in (2, 5):  # one of them is killed with leases in its hands
        dead = workers[step % 2]
        mine = set(parts[step % 2])
        while len(mine & queue._leases.keys()) < 5:
          await asyncio.sleep(0.001)
        os.kill(dead.process.pid, signal.SIGKILL)
        ended.append(await dead.end())
        workers[step % 2] = FarWorker(queue, parts[step % 2])
      groups += await queue.get_batch(6, step)
    await queue.shutdown()
    ended += [await worker.end() for worker in workers]
  listener.cancel()
  assert ended == [-9, -9, 0, 0]
  assert [len(group) for group in groups] == [3] * 48
  names = [row.trajectory_id for group in groups for row in group]
  assert len(set(names)) == len(names)
  numbers = [group[0].env_group + group[0].episode_id for group in groups]
  assert sorted(numbers) == list(range(48))
  assert queue.counts['abandoned'] >= 10 and queue.counts['failed'] == 0
  ends = collections.Counter(
    end for lease_ends in queue.ends.values() for end in lease_ends
  )
  assert len(set(queue.begun)) == len(queue.begun) == queue.counts['leased']
  assert all(len(queue.ends[lease]) == 1 for lease in queue.begun)
  assert ends == {'put': 48 * 3, 'given up': queue.counts['abandoned']}


async def test_environments_in_processes_that_die_hang_raise_or_leak():
  commands = itertools.cycle(
    ['go', 'die', 'go', 'go', f'leak {1 << 30}', 'go', 'go', 'hang', 'go', 'raise']
  )
  queue = GroupQueue(
    num_groups=3, group_size=2, num_env_groups=3, options=QueueOptions(max_retries=9)
  )
  pool, envs = ThreadPool(6), []

  def make():
    envs.append(IsolatedEnv('tests.envs.faulty:Faulty', {}, memory=512 << 20))
    return envs[-1]

  shared = world(make, FakeEngine(lambda *_: next(commands)), queue, pool=pool)
  worker = EnvWorker(
    shared, partition_envs(3, 2, 1)[0], {'timeouts': Timeouts(step=1.0)}
  )
  task = asyncio.create_task(worker.run({'seed': 0}))
  async with asyncio.timeout(LIMIT):
    for step in range(2):
      await queue.advance_step(step)
      groups = await queue.get_batch(3, step)
      assert [len(group) for group in groups] == [2] * 3
      assert not any(row.failed for group in groups for row in group)
    await queue.shutdown()
    assert await task == queue.counts['leased']
  counts = queue.counts
  assert counts['played'] == 12 and counts['leased'] == 12 + counts['retried']
  assert counts['retried'] >= 4
  assert not any(env._child for env in envs)
  pool.close()
