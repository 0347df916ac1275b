"""Many managers, a queue and a data set together: all of it repeats, none is lost."""

import asyncio
import functools
import itertools
import time

import numpy as np
import pytest

from jaxrl.data.dataset import GlobalDataset
from jaxrl.rollout.engine.actor_proxy import ActorProxy, maybe_await
from jaxrl.rollout.env_manager import EnvManager
from jaxrl.rollout.env_worker import EnvWorker, partition_envs
from jaxrl.rollout.queue.group_queue import GroupQueue, QueueOptions
from jaxrl.rollout.thread_pool import ThreadPool, Timeouts
from tests.rollout.fakes import BadEnv, EchoEnv, FakeEngine, world


async def collect(steps=3, groups=4, size=3, env_groups=4, workers=2, **options):
  """Plays `steps` steps; returns their groups and the queue."""
  queue = GroupQueue(num_groups=groups, group_size=size, num_env_groups=env_groups)
  queue = options.pop('queue', queue)
  handle = options.pop('handle', lambda q: q)(queue)
  context = world(queue=handle, rows=options.pop('rows', 7), **options)
  tasks = [
    asyncio.create_task(EnvWorker(context, places, {'max_steps': 2}).run({'seed': 5}))
    for places in partition_envs(env_groups, size, workers)
  ]
  batches = []
  for step in range(steps):
    await queue.advance_step(step)
    batches.append(await asyncio.wait_for(queue.get_batch(groups, step), 20))
  await queue.shutdown()
  counts = await asyncio.wait_for(asyncio.gather(*tasks), 20)
  context.pool.close()
  return batches, queue, sum(counts)


def fingerprint(batches):
  return [
    (r.group_name.split('_')[2], r.sample_index, r.tokens.tolist(), r.rewards.tolist())
    for groups in batches
    for group in groups
    for r in group
  ]


class SleepyEngine(FakeEngine):
  """Answers in an order of its own."""

  async def generate(self, request_id, token_ids, sampling):
    self.delay = np.random.default_rng(time.perf_counter_ns()).uniform(0, 0.004)
    return await super().generate(request_id, token_ids, sampling)


async def test_all_is_put_once_and_whole():
  batches, queue, count = await collect()
  assert count == queue.counts['played'] == 3 * 4 * 3
  ids = [r.trajectory_id for groups in batches for g in groups for r in g]
  assert len(set(ids)) == len(ids) == 36
  seeds = [group[0].episode_seed for groups in batches for group in groups]
  assert seeds == list(range(5, 17))


async def test_timing_workers_and_env_groups_change_nothing():
  plain, _, _ = await collect()
  for options in (
    {'engine': SleepyEngine()},
    {'workers': 1, 'pool': ThreadPool(8)},
    {'env_groups': 2},
    {'env_groups': 6},
  ):
    other, _, _ = await collect(**options)
    assert fingerprint(other) == fingerprint(plain)


class ActorMethod:
  """What a Ray actor's method looks like to its caller."""

  def __init__(self, method):
    self._method = method

  def remote(self, *args, **kwargs):
    async def call():
      await asyncio.sleep(0)
      return await maybe_await(self._method(*args, **kwargs))

    return asyncio.ensure_future(call())


class Actor:
  def __init__(self, hosted):
    self._hosted = hosted

  def __getattr__(self, name):
    return ActorMethod(getattr(self._hosted, name))


async def test_actors_and_objects_give_the_same():
  plain, _, _ = await collect()
  remote, _, _ = await collect(handle=lambda queue: ActorProxy(Actor(queue)))
  assert fingerprint(remote) == fingerprint(plain)


@pytest.mark.parametrize('fault', ['reset raises', 'step raises', 'step hangs'])
async def test_environments_that_break_now_and_then(fault):
  counter = iter(range(10_000))

  def make_env():
    return BadEnv(fault=fault if next(counter) % 3 == 0 else '', seconds=0.2)

  queue = GroupQueue(
    num_groups=4, group_size=3, num_env_groups=4, options=QueueOptions(max_retries=9)
  )
  pool, options = ThreadPool(12), {'max_steps': 2, 'timeouts': Timeouts(step=0.05)}
  shared = world(make_env, queue=queue, pool=pool)
  places = partition_envs(4, 3, 1)[0]
  worker = EnvWorker(shared, places, options)
  task = asyncio.create_task(worker.run({'seed': 0}))
  for step in range(3):
    await queue.advance_step(step)
    groups = await asyncio.wait_for(queue.get_batch(4, step), 20)
    assert [len(group) for group in groups] == [3] * 4
    assert not any(row.failed for group in groups for row in group)
  await queue.shutdown()
  assert await asyncio.wait_for(task, 20) == queue.counts['leased']
  counts = queue.counts
  assert counts['played'] == 36
  assert counts['leased'] == counts['played'] + counts['retried']
  assert counts['retried'] > 0
  pool.close()


@pytest.mark.slow
async def test_two_thousand_at_once_on_real_threads():
  """Of the environments every tenth breaks, each in its own way."""
  counter = iter(range(100_000))
  faults = [
    'step raises',
    'step garbage',
    'step gives nan',
    'reset raises',
    'step exits',
  ]

  def make_env():
    number = next(counter)
    return BadEnv(fault=faults[number // 10 % 5] if number % 10 == 0 else '')

  queue = GroupQueue(
    num_groups=250,
    group_size=8,
    num_env_groups=250,
    options=QueueOptions(max_retries=20),
  )
  pool = ThreadPool(16)
  shared = world(make_env, queue=queue, pool=pool)
  worker = EnvWorker(shared, partition_envs(250, 8, 1)[0], {'max_steps': 2})
  task = asyncio.create_task(worker.run({'seed': 0}))
  await queue.advance_step(0)
  groups = await asyncio.wait_for(queue.get_batch(250, 0), 120)
  assert [len(group) for group in groups] == [8] * 250
  names = {row.trajectory_id for group in groups for row in group}
  assert len(names) == 2000 == queue.counts['played']
  await queue.shutdown()
  assert await asyncio.wait_for(task, 60) == queue.counts['leased']
  assert queue.counts['leased'] == 2000 + queue.counts['retried'] > 2100
  pool.close()


async def test_surplus_episodes_are_ended_at_once():
  class Slow(FakeEngine):
    async def generate(self, request_id, token_ids, sampling):
      self.delay = 60 if request_id.split('/')[4] == '1' else 0
      return await super().generate(request_id, token_ids, sampling)

  queue = GroupQueue(
    num_groups=2, group_size=2, num_env_groups=2, options=QueueOptions(extra_samples=1)
  )
  engine, pool = Slow(), ThreadPool(2)
  shared = world(queue=queue, engine=engine, pool=pool)
  worker = EnvWorker(shared, partition_envs(2, 3, 1)[0])
  task = asyncio.create_task(worker.run({'seed': 0}))
  for step in range(3):
    await queue.advance_step(step)
    groups = await asyncio.wait_for(queue.get_batch(2, step), 10)
    assert [[r.sample_index for r in group] for group in groups] == [[0, 2]] * 2
  await queue.shutdown()
  await asyncio.wait_for(task, 10)
  assert len(engine.aborted) == 6
  pool.close()


async def test_an_error_of_the_queue_ends_the_worker():
  class Broken:
    async def get_episode_id(self, group_id, env_id):
      raise ConnectionError('queue gone')

    async def wait_cancelled(self, after):
      await asyncio.sleep(60)

  worker = EnvWorker(world(queue=Broken()), [(0, 0), (0, 1)])
  with pytest.raises(ConnectionError, match='queue gone'):
    await worker.run({'seed': 0})


async def test_traversal_through_the_queue_plays_each_item_once():
  queue = GroupQueue(num_groups=-1, group_size=2, num_env_groups=3)
  shared = world(EchoEnv, queue=queue, rows=8, mode='traversal')
  worker = EnvWorker(shared, partition_envs(3, 2, 1)[0])
  task = asyncio.create_task(worker.run({'seed': 3}))
  groups = await asyncio.wait_for(queue.get_batch(-1, 0), 10)
  questions = [group[0].messages[0]['content'] for group in groups]
  assert questions == [f'q{i}' for i in range(8)]
  await asyncio.wait_for(task, 10)


class OwnData(EchoEnv):
  """Opens a data set itself, one for all environments of a process."""

  def __init__(self, data, by_seed=True):
    super().__init__()
    self.data, self.by_seed = data, by_seed

  def reset(self, *, seed, options=None):
    item = self.data.get_data_item(seed if self.by_seed else None)
    return (item['question'], {}) if item else (None, None)


@pytest.mark.parametrize(('num_workers', 'by_seed'), [(1, True), (1, False), (3, True)])
async def test_an_environment_that_opens_its_own_data_gets_every_row(
  num_workers, by_seed
):
  """The trial before the run takes none, and each process opens a data set."""
  rows = [{'question': f'q{i}', 'answer': '1'} for i in range(24)]
  size = 2 if by_seed else 1
  queue = GroupQueue(num_groups=-1, group_size=size, num_env_groups=5)
  tasks = []
  for part in partition_envs(5, size, num_workers):
    data = GlobalDataset(rows, mode='traversal')
    make_env = functools.partial(OwnData, data, by_seed)
    trial = EnvManager(world(make_env))
    for number in range(2):
      cache = await trial.try_reset(number, base_seed=3)
      assert cache is not None and not cache.done
    worker = EnvWorker(world(make_env, queue=queue), part)
    tasks.append(asyncio.create_task(worker.run({'seed': 3})))
  groups = await asyncio.wait_for(queue.get_batch(-1, 0), 10)
  questions = [[row.messages[0]['content'] for row in group] for group in groups]
  assert sorted(questions) == sorted([[f'q{i}'] * size for i in range(24)])
  await asyncio.wait_for(asyncio.gather(*tasks), 10)


def test_share_out_keeps_groups_together():
  places = partition_envs(5, 2, 2)
  assert sorted(itertools.chain(*places)) == [
    (g, e) for g in range(5) for e in range(2)
  ]
  assert {g for g, _ in places[0]} == {0, 2, 4}
