"""The queue: unique leases, whole groups in order, nothing lost, nobody stuck."""

import asyncio
import json
import pickle

import numpy as np
import pytest

from jaxrl.rollout.queue.group_queue import GroupQueue, QueueOptions
from jaxrl.rollout.queue.group_state import FailureLog
from tests.calls import make_group_filter, split_options
from tests.rollout.fakes import row


async def soon(awaitable):
  """Fails instead of hanging."""
  return await asyncio.wait_for(awaitable, 5)


async def is_waiting(task):
  await asyncio.sleep(0.02)
  return not task.done()


async def put(queue, lease, env_id=0, score=1.0, stop_reason='finish', rows=None):
  rows = rows or [
    row(score, lease.sample_index, stop_reason, episode_id=lease.episode_id)
  ]
  return await queue.put(
    lease.env_group, lease.episode_id, lease.start_step, rows, env_id
  )


async def fill(queue, group_id, size, score=1.0):
  """Plays one whole group of an env group."""
  leases = [await soon(queue.get_episode_id(group_id, e)) for e in range(size)]
  for env_id, lease in enumerate(leases):
    assert await put(queue, lease, env_id, score)
  return leases


async def test_one_lease_for_each_member():
  queue = GroupQueue(num_groups=2, group_size=3, num_env_groups=2)
  await queue.advance_step(0)
  leases = [await soon(queue.get_episode_id(1, e)) for e in range(3)]
  assert [(x.episode_id, x.sample_index) for x in leases] == [(0, 0), (0, 1), (0, 2)]
  fast = asyncio.create_task(queue.get_episode_id(1, 3))
  assert await is_waiting(fast)
  await queue.shutdown()
  assert await soon(fast) is None


async def test_episodes_go_in_strides_and_groups_come_in_order():
  queue = GroupQueue(num_groups=4, group_size=1, num_env_groups=2)
  await queue.advance_step(0)
  seen = []
  for group_id in (1, 1, 0, 0):
    seen += [(group_id, (await fill(queue, group_id, 1, 10 + len(seen)))[0].episode_id)]
  assert seen == [(1, 0), (1, 2), (0, 0), (0, 2)]
  groups = await soon(queue.get_batch(4, 0))
  assert [g[0].score for g in groups] == [12, 10, 13, 11]


async def test_members_come_in_order_whoever_is_first():
  queue = GroupQueue(num_groups=1, group_size=3, num_env_groups=1)
  await queue.advance_step(0)
  leases = [await soon(queue.get_episode_id(0, e)) for e in range(3)]
  for env_id in (2, 0, 1):
    await put(queue, leases[env_id], env_id)
  (group,) = await soon(queue.get_batch(1, 0))
  assert [r.sample_index for r in group] == [0, 1, 2]


@pytest.mark.parametrize('in_order', [True, False])
async def test_a_group_that_is_finished_early_waits_for_its_turn(in_order):
  options = {'num_groups': 2, 'num_env_groups': 2, 'in_order': in_order}
  queue = GroupQueue(group_size=1, **options)
  await queue.advance_step(0)
  await fill(queue, 1, 1, score=11)
  batch = asyncio.create_task(queue.get_batch(1, 0))
  assert await is_waiting(batch) == in_order
  await fill(queue, 0, 1, score=10)
  assert [group[0].score for group in await soon(batch)] == [10 if in_order else 11]


async def test_asking_again_gives_the_old_lease_up():
  queue = GroupQueue(num_groups=1, group_size=2, num_env_groups=1)
  await queue.advance_step(0)
  first = await soon(queue.get_episode_id(0, 0))
  again = await soon(queue.get_episode_id(0, 0))
  assert (first.sample_index, first.attempt) == (0, 0)
  assert (again.sample_index, again.attempt) == (0, 1)
  assert queue.counts['abandoned'] == 1


@pytest.mark.parametrize('max_retries', [0, 1])
async def test_lost_workers_cost_no_retries_but_not_for_ever(max_retries):
  queue = GroupQueue(
    num_groups=1,
    group_size=2,
    num_env_groups=1,
    options=QueueOptions(max_retries=max_retries),
  )
  await queue.advance_step(0)
  for attempt in range(4 + max_retries):
    lease = await soon(queue.get_episode_id(0, 0))
    assert (lease.episode_id, lease.sample_index, lease.attempt) == (0, 0, attempt)
  assert queue.counts['failed'] == 0
  assert (await soon(queue.get_episode_id(0, 0))).sample_index == 1
  assert queue.counts['failed'] == 1


async def test_a_failure_after_a_lost_worker_is_the_first():
  queue = GroupQueue(
    num_groups=1, num_env_groups=1, options=QueueOptions(max_retries=1)
  )
  await queue.advance_step(0)
  await soon(queue.get_episode_id(0, 0))
  await put(queue, await soon(queue.get_episode_id(0, 0)), stop_reason='env_error')
  assert await put(queue, await soon(queue.get_episode_id(0, 0)))
  ((played,),) = await soon(queue.get_batch(1, 0))
  assert played.episode_id == 0 and queue.counts['failed'] == 0
  assert queue.counts['stopped/env_error'] == queue.counts['stopped/abort'] == 1


async def test_puts_without_a_lease_are_ignored():
  queue = GroupQueue(num_groups=1, group_size=1, num_env_groups=1)
  await queue.advance_step(0)
  lease = await soon(queue.get_episode_id(0, 0))
  assert not await put(queue, lease._replace(episode_id=1))
  assert not await put(queue, lease, env_id=9)
  assert not await put(queue, lease._replace(start_step=4))
  assert await put(queue, lease)
  assert not await put(queue, lease)
  assert queue.counts['ignored'] == 4


async def test_a_filtered_group_is_replaced_and_everyone_is_woken():
  drops = {0}
  queue = GroupQueue(
    lambda g, e, group: g + e in drops, num_groups=1, group_size=3, num_env_groups=1
  )
  await queue.advance_step(0)
  leases = [await soon(queue.get_episode_id(0, e)) for e in range(3)]
  for env_id in (0, 1):
    await put(queue, leases[env_id], env_id)
  waiting = [asyncio.create_task(queue.get_episode_id(0, e)) for e in (0, 1)]
  assert await is_waiting(waiting[0])
  await put(queue, leases[2], 2)
  waiting.append(asyncio.create_task(queue.get_episode_id(0, 2)))
  again = await soon(asyncio.gather(*waiting))
  assert sorted(x.sample_index for x in again) == [0, 1, 2]
  assert {x.episode_id for x in again} == {1}
  for env_id, lease in enumerate(again):
    await put(queue, lease, env_id)
  assert len(await soon(queue.get_batch(1, 0))) == 1
  assert queue.counts['filtered'] == 1


async def test_a_filter_that_drops_all_is_an_error_not_a_hang():
  queue = GroupQueue(
    lambda *_: True,
    num_groups=1,
    num_env_groups=1,
    options=QueueOptions(max_consecutive_drops=5),
  )
  await queue.advance_step(0)

  async def environment():
    while (lease := await queue.get_episode_id(0, 0)) is not None:
      await put(queue, lease)

  task = asyncio.create_task(environment())
  with pytest.raises(RuntimeError, match=r'5 groups in a row.*filter'):
    await soon(queue.get_batch(1, 0))
  await queue.shutdown()
  await soon(task)


async def test_an_error_in_the_filter_reaches_the_trainer():
  def broken(group_id, episode_id, group):
    raise ZeroDivisionError('mine')

  queue = GroupQueue(broken, num_groups=1, num_env_groups=1)
  await queue.advance_step(0)
  await fill(queue, 0, 1)
  with pytest.raises(ZeroDivisionError, match='mine'):
    await soon(queue.get_batch(1, 0))


async def test_a_failed_member_is_retried_with_its_seed_then_the_group_replaced():
  queue = GroupQueue(
    num_groups=1, group_size=2, num_env_groups=1, options=QueueOptions(max_retries=1)
  )
  await queue.advance_step(0)
  await put(queue, await soon(queue.get_episode_id(0, 0)), 0)
  for attempt in (0, 1):
    lease = await soon(queue.get_episode_id(0, 1))
    assert (lease.episode_id, lease.sample_index, lease.attempt) == (0, 1, attempt)
    await put(queue, lease, 1, stop_reason='env_error')
  leases = await fill(queue, 0, 2)
  assert {x.episode_id for x in leases} == {1}
  (group,) = await soon(queue.get_batch(1, 0))
  assert len(group) == 2
  assert queue.counts['dropped'] == 1


@pytest.mark.parametrize(
  ('options', 'size'),
  [
    ({'min_group_size': 1}, 1),
    ({'keep_failed': True}, 2),
  ],
)
async def test_groups_with_a_failed_member_by_policy(options, size):
  queue = GroupQueue(
    num_groups=1,
    group_size=2,
    num_env_groups=1,
    **split_options(QueueOptions, {'max_retries': 0, **options}),
  )
  await queue.advance_step(0)
  leases = [await soon(queue.get_episode_id(0, e)) for e in range(2)]
  await put(queue, leases[0], 0, stop_reason='env_timeout')
  await put(queue, leases[1], 1)
  (group,) = await soon(queue.get_batch(1, 0))
  assert len(group) == size
  assert group[-1].stop_reason == 'finish'


async def test_when_all_fail_the_error_says_why():
  queue = GroupQueue(
    num_groups=1,
    num_env_groups=1,
    options=QueueOptions(max_retries=0, max_consecutive_drops=3),
  )
  await queue.advance_step(0)
  for _ in range(3):
    lease = await soon(queue.get_episode_id(0, 0))
    bad = row(stop_reason='env_error', extras={'error': 'KeyError: broken'})
    await put(queue, lease, rows=[bad])
  with pytest.raises(RuntimeError, match='1 × env_error: KeyError: broken'):
    await soon(queue.get_batch(1, 0))


async def test_failures_are_logged_once_for_each_place(caplog):
  known = FailureLog()
  known.record('b', 'a trial step raised', "KeyError: 'x' (lab/b.py, line 3)")
  caplog.clear()
  failures = pickle.loads(pickle.dumps(known))  # as a queue elsewhere gets it
  queue = GroupQueue(
    num_groups=9,
    num_env_groups=1,
    failures=failures,
    options=QueueOptions(max_retries=0),
  )
  await queue.advance_step(0)
  for tag, reason, error in (
    ('a', 'env_error', "KeyError: 'x' (lab/a.py, line 3)"),
    ('a', 'env_error', "KeyError: 'y' (lab/a.py, line 3)"),
    ('a', 'reward_failed', 'rule: GraderError: rule: E: e (lab/a.py, line 4)'),
    ('b', 'env_error', "KeyError: 'y' (lab/b.py, line 3)"),
    ('a', 'env_timeout', 'CallTimeoutError: no answer within 1 s'),
    ('a', 'env_timeout', 'CallTimeoutError: no answer within 2 s'),
    ('a', 'abort', 'the queue cancelled the lease'),
  ):
    lease = await soon(queue.get_episode_id(0, 0))
    bad = row(stop_reason=reason, extras={'error': error}, episode_id=lease.episode_id)
    bad.tag = tag
    await put(queue, lease, rows=[bad])
  assert caplog.messages == [
    f'env.a: an episode failed with {reason} (shown once): {error}'
    for reason, error in (
      ('env_error', "KeyError: 'x' (lab/a.py, line 3)"),
      ('reward_failed', 'rule: GraderError: rule: E: e (lab/a.py, line 4)'),
      ('env_timeout', 'CallTimeoutError: no answer within 1 s'),
    )
  ]
  caplog.clear()
  for failure in queue.take_failures()[1:]:  # here, what a queue elsewhere has logged
    known.record(*failure)
  assert len(caplog.messages) == 3
  assert queue.take_failures() == []


async def test_a_lease_past_its_deadline_is_played_by_another():
  now = [0.0]
  queue = GroupQueue(
    clock=lambda: now[0],
    num_groups=1,
    num_env_groups=1,
    options=QueueOptions(episode_timeout=10),
  )
  await queue.advance_step(0)
  hung = await soon(queue.get_episode_id(0, 0))
  other = asyncio.create_task(queue.get_episode_id(0, 1))
  assert await is_waiting(other)
  now[0] = 11.0
  assert queue.expire_leases() == 1
  lease = await soon(other)
  assert (lease.sample_index, lease.attempt) == (hung.sample_index, 1)
  assert await soon(queue.wait_cancelled(0)) == (1, [(0, 0, hung)])
  assert not await put(queue, hung, 0)
  assert await put(queue, lease, 1)
  assert len(await soon(queue.get_batch(1, 0))) == 1


async def test_get_batch_looks_at_deadlines_by_itself():
  queue = GroupQueue(
    num_groups=1,
    num_env_groups=1,
    options=QueueOptions(episode_timeout=0.05, max_retries=0, max_consecutive_drops=1),
  )
  await queue.advance_step(0)
  await soon(queue.get_episode_id(0, 0))
  with pytest.raises(RuntimeError, match='env_timeout: no result within rollout'):
    await soon(queue.get_batch(1, 0))


async def test_surplus_members_are_given_up():
  queue = GroupQueue(
    num_groups=1, group_size=2, num_env_groups=1, options=QueueOptions(extra_samples=1)
  )
  await queue.advance_step(0)
  leases = [await soon(queue.get_episode_id(0, e)) for e in range(3)]
  await put(queue, leases[2], 2)
  await put(queue, leases[0], 0)
  (group,) = await soon(queue.get_batch(1, 0))
  assert [r.sample_index for r in group] == [0, 2]
  assert await soon(queue.wait_cancelled(0)) == (1, [(0, 1, leases[1])])
  assert not await put(queue, leases[1], 1)


@pytest.mark.parametrize(
  ('ratio', 'capacity'),
  [
    (0, 4),
    (0.25, 5),
    (0.3, 6),
    (0.5, 6),
    (1.0, 8),
    (2, 12),
  ],
)
async def test_async_ratio_says_how_many_groups_are_ahead(ratio, capacity):
  queue = GroupQueue(
    num_groups=4, num_env_groups=4, options=QueueOptions(async_ratio=ratio)
  )
  for step in range(3):
    await queue.advance_step(step)
    state = queue.state_dict()
    assert len(state['pending']) == capacity
    for number in state['pending'][:4]:
      await fill(queue, number % 4, 1)
    groups = await soon(queue.get_batch(4, step))
    assert [g[0].episode_id + 0 for g in groups] == [
      n - n % 4 for n in state['pending'][:4]
    ]
    assert len(queue.state_dict()['pending']) == capacity - 4


async def test_old_groups_expire():
  queue = GroupQueue(
    num_groups=1, num_env_groups=2, in_order=False, options=QueueOptions(async_ratio=1)
  )
  await queue.advance_step(0)
  old = await soon(queue.get_episode_id(0, 0))
  await fill(queue, 1, 1)
  assert len(await soon(queue.get_batch(1, 0))) == 1
  await queue.advance_step(2)
  assert queue.counts['expired'] == 1
  assert not await put(queue, old)
  assert (await soon(queue.wait_cancelled(0)))[1] == [(0, 0, old)]


async def test_until_the_data_is_traversed():
  size, queue = 10, GroupQueue(num_groups=-1, group_size=2, num_env_groups=3)

  async def environment(group_id, env_id):
    while (lease := await queue.get_episode_id(group_id, env_id)) is not None:
      await asyncio.sleep(0.001 * (group_id == 0))  # one env group is slow
      number = group_id + lease.episode_id
      rows = [row(number, lease.sample_index)] if number < size else None
      await queue.put(group_id, lease.episode_id, lease.start_step, rows, env_id)

  tasks = [asyncio.create_task(environment(g, e)) for g in range(3) for e in range(2)]
  groups = await soon(queue.get_batch(-1, 0))
  assert [g[0].score for g in groups] == list(range(size))
  assert all(len(g) == 2 for g in groups)
  await soon(asyncio.gather(*tasks))


async def test_a_fixed_number_of_groups_without_data():
  queue = GroupQueue(num_groups=-1, num_env_groups=4, total=6)

  async def environment(group_id):
    while (lease := await queue.get_episode_id(group_id, 0)) is not None:
      await put(queue, lease, score=lease.env_group + lease.episode_id)

  tasks = [asyncio.create_task(environment(g)) for g in range(4)]
  groups = await soon(queue.get_batch(-1, 0))
  assert [g[0].score for g in groups] == list(range(6))
  await soon(asyncio.gather(*tasks))


async def test_data_that_ends_mid_step_gives_what_there_is():
  queue = GroupQueue(num_groups=4, num_env_groups=4)
  await queue.advance_step(0)
  await fill(queue, 0, 1)
  failed = await soon(queue.get_episode_id(1, 0))
  for group_id in (2, 3):
    lease = await soon(queue.get_episode_id(group_id, 0))
    await queue.put(group_id, lease.episode_id, 0, None, 0)
    assert await soon(queue.get_episode_id(group_id, 0)) is None
  await put(queue, failed, stop_reason='env_error')
  await fill(queue, 1, 1)  # the retry is still played
  assert len(await soon(queue.get_batch(4, 0))) == 2
  await queue.advance_step(1)
  assert await soon(queue.get_batch(4, 1)) == []


async def test_state_survives_json_and_pending_groups_are_played_again():
  queue = GroupQueue(
    num_groups=2, num_env_groups=2, options=QueueOptions(async_ratio=1)
  )
  await queue.advance_step(0)
  for group_id in (0, 1, 0):
    await fill(queue, group_id, 1)
  await soon(queue.get_batch(2, 0))
  state = json.loads(json.dumps(queue.state_dict()))
  resumed = GroupQueue(
    num_groups=2, num_env_groups=2, options=QueueOptions(async_ratio=1)
  )
  resumed.load_state_dict(state)
  await resumed.advance_step(1)
  assert resumed.state_dict()['pending'] == [2, 3, 4, 5]
  assert (await soon(resumed.get_episode_id(0, 0))).episode_id == 2


async def test_shutdown_lets_everyone_go():
  queue = GroupQueue(num_groups=1, num_env_groups=1)
  waiting = asyncio.create_task(queue.get_episode_id(0, 0))
  batch = asyncio.create_task(queue.get_batch(1))
  assert await is_waiting(waiting)
  await queue.shutdown()
  assert await soon(waiting) is None
  assert await soon(batch) == []


def test_options_are_checked():
  for options in (
    {'num_groups': 0},
    {'group_size': 0},
    {'async_ratio': -0.5},
    {'min_group_size': 9},
    {'max_retries': -1},
  ):
    with pytest.raises(ValueError):
      GroupQueue(**split_options(QueueOptions, options))


async def test_to_ask_for_a_batch_is_to_begin_its_step():
  queue = GroupQueue(num_groups=2, group_size=2, num_env_groups=2)
  for _ in range(2):  # the second time nothing is left of the step
    waiting = asyncio.create_task(queue.get_batch(2, 0))
    for group_id in (0, 1):
      await fill(queue, group_id, 2)
    assert len(await soon(waiting)) == 2


async def test_more_groups_than_are_ever_admitted_is_an_error():
  with pytest.raises(ValueError, match='at most 4 are ever admitted'):
    await GroupQueue(num_groups=4).get_batch(5, 0)


async def test_3200_episodes_have_3200_seeds():
  """32 env groups × 100 episodes, played by loops that are out of step."""
  queue = GroupQueue(num_groups=-1, num_env_groups=32, total=3200)
  seeds = []

  async def environment(group_id):
    while (lease := await queue.get_episode_id(group_id, 0)) is not None:
      seeds.append(1000 + lease.env_group + lease.episode_id)
      if group_id % 3 == 0:
        await asyncio.sleep(0)
      await put(queue, lease)

  tasks = [asyncio.create_task(environment(g)) for g in range(32)]
  assert len(await soon(queue.get_batch(-1, 0))) == 3200
  await soon(asyncio.gather(*tasks))
  assert sorted(seeds) == list(range(1000, 4200))


def of_version(version, member=0):
  played = row(1.0, member)
  played.weights_version = np.array([-1, version], np.int32)
  return [played]


async def test_stale_groups_are_lost_and_replaced():
  queue = GroupQueue(
    num_groups=2, num_env_groups=2, options=QueueOptions(async_ratio=1.0)
  )
  await queue.advance_step(3)
  for group_id, version in ((0, 1), (1, 2)):
    lease = await soon(queue.get_episode_id(group_id, 0))
    await put(queue, lease, rows=of_version(version))
  waiting = asyncio.create_task(queue.get_batch(2, 3, min_version=2))
  assert await is_waiting(waiting)
  assert queue.counts['stale'] == 1
  lease = await soon(queue.get_episode_id(0, 0))
  await put(queue, lease, rows=of_version(3))
  lease = await soon(queue.get_episode_id(1, 0))
  await put(queue, lease, rows=of_version(3))
  groups = await soon(waiting)
  assert min(int(g[0].weights_version[1]) for g in groups) == 2
  assert len(queue.state_dict()['pending']) == 2  # those ahead, one of them new


async def test_a_group_of_mixed_versions_is_as_old_as_its_oldest_token():
  queue = GroupQueue(
    num_groups=1, num_env_groups=1, options=QueueOptions(max_consecutive_drops=2)
  )
  await queue.advance_step(5)
  old, new = of_version(4)[0], of_version(5)[0]
  new.turn = 1
  for _ in range(2):
    await put(queue, await soon(queue.get_episode_id(0, 0)), rows=[old, new])
    if not queue.counts['stale']:
      assert len(queue.state_dict()['pending']) == 1
    waiting = asyncio.create_task(queue.get_batch(1, 5, min_version=5))
    await asyncio.sleep(0.02)
    if queue.counts['stale'] < 2:
      waiting.cancel()
  with pytest.raises(
    RuntimeError, match=r'2 for staleness.*step 4, but step 5.*max_staleness'
  ):
    await soon(waiting)


async def test_a_group_is_shaped_once_when_it_is_kept():
  shapes = []

  def shaper(group):
    shapes.append(group[0].score)
    return [row(10 + group[0].score)]

  queue = GroupQueue(
    lambda g, e, group: group[0].score < 1,
    shaper,
    num_groups=1,
    num_env_groups=1,
  )
  await queue.advance_step(0)
  for score in (0.0, 3.0):
    await put(queue, await soon(queue.get_episode_id(0, 0)), score=score)
  (group,) = await soon(queue.get_batch(1, 0))
  assert group[0].score == 13 and shapes == [3]


async def test_an_error_in_a_shaper_reaches_the_trainer():
  queue = GroupQueue(
    None, lambda group: group[0].nonsense, num_groups=1, num_env_groups=1
  )
  await queue.advance_step(0)
  await fill(queue, 0, 1)
  with pytest.raises(AttributeError, match='nonsense'):
    await soon(queue.get_batch(1, 0))


async def test_the_batch_is_refilled_until_it_is_full_or_the_bound_is_reached():
  queue = GroupQueue(
    make_group_filter('reward_std(threshold=9.0) + accuracy'),
    num_groups=2,
    group_size=2,
    num_env_groups=2,
    options=QueueOptions(max_consecutive_drops=3),
  )
  await queue.advance_step(0)
  kept = 0

  async def play(first, second):
    group_id = next(n for n in (0, 1) if queue._active_groups(n))
    for env_id, score in enumerate((first, second)):
      lease = await soon(queue.get_episode_id(group_id, env_id))
      await put(queue, lease, env_id, score)

  for first, second in ((0, 0), (0, 0), (0, 30), (0, 0), (0, 0), (0.5, 0)):
    await play(first, second)
    kept += second == 30
  with pytest.raises(RuntimeError) as caught:
    await soon(queue.get_batch(2, 0))
  message = str(caught.value)
  assert (
    '3 groups in a row were dropped' in message
    and 'rollout.max_consecutive_drops=3' in message
  )
  assert '6 groups were played; dropped: 5 for reward_std.' in message
  assert 'What may help' in message


async def test_refilled_batches_are_full():
  queue = GroupQueue(
    make_group_filter('accuracy'),
    num_groups=2,
    group_size=2,
    num_env_groups=2,
    options=QueueOptions(max_consecutive_drops=3),
  )
  await queue.advance_step(0)
  scores = iter([(0, 0), (1, 1), (0, 1), (0, 0), (0, 0), (1, 0)])

  async def play():
    for first, second in scores:
      group_id = next(n for n in (0, 1) if queue._active_groups(n))
      for env_id, score in enumerate((first, second)):
        lease = await soon(queue.get_episode_id(group_id, env_id))
        await put(queue, lease, env_id, score)

  await play()
  groups = await soon(queue.get_batch(2, 0))
  assert [[r.score for r in g] for g in groups] == [[0, 1], [1, 0]]
  assert queue.counts['filtered'] == 4
  results = queue.results()
  assert sorted(mean for _, mean, _ in results) == [0, 0, 0, 0.5, 0.5, 1]
  assert {count for *_, count in results} == {2} and queue.results() == []


async def test_results_not_yet_asked_for_are_in_the_state():
  queue = GroupQueue(make_group_filter('accuracy'), num_groups=1, group_size=2)
  await queue.advance_step(0)
  await fill(queue, 0, 2, 1.0)
  state = json.loads(json.dumps(queue.state_dict()))
  other = GroupQueue(num_groups=1, group_size=2)
  other.load_state_dict(state)
  assert other.results() == queue.results() == [(0, 1.0, 2)]


async def test_the_greedy_member_comes_last_and_makes_the_group_whole():
  queue = GroupQueue(num_groups=1, group_size=2, num_env_groups=1, greedy=True)
  await queue.advance_step(0)
  leases = [await soon(queue.get_episode_id(0, e)) for e in range(3)]
  assert [(x.sample_index, x.greedy) for x in leases] == [
    (0, False),
    (1, False),
    (2, True),
  ]
  for env_id in (0, 1):
    await put(queue, leases[env_id], env_id)
  waiting = asyncio.create_task(queue.get_batch(1, 0))
  assert await is_waiting(waiting)
  await put(queue, leases[2], 2, rows=[row(9, 2, is_greedy=True)])
  (group,) = await soon(waiting)
  assert [r.sample_index for r in group] == [0, 1, 2]


async def test_no_surplus_member_stands_in_for_the_greedy_one():
  queue = GroupQueue(
    num_groups=1,
    group_size=1,
    num_env_groups=1,
    greedy=True,
    options=QueueOptions(extra_samples=1),
  )
  await queue.advance_step(0)
  leases = [await soon(queue.get_episode_id(0, e)) for e in range(3)]
  assert [x.greedy for x in leases] == [False, False, True]
  await put(queue, leases[2], 2, rows=[row(9, 2, is_greedy=True)])
  await put(queue, leases[1], 1)
  (group,) = await soon(queue.get_batch(1, 0))
  assert [(r.sample_index, r.is_greedy) for r in group] == [(1, False), (2, True)]
  assert queue.counts['surplus'] == 1


async def test_a_group_without_its_greedy_member_is_replaced():
  queue = GroupQueue(
    num_groups=1,
    group_size=2,
    num_env_groups=1,
    greedy=True,
    options=QueueOptions(max_retries=0, min_group_size=1),
  )
  await queue.advance_step(0)
  leases = [await soon(queue.get_episode_id(0, e)) for e in range(3)]
  await put(queue, leases[2], 2, stop_reason='env_error')
  for env_id in (0, 1):
    await put(queue, leases[env_id], env_id)
  assert queue.counts['dropped'] == 1
  leases = [await soon(queue.get_episode_id(0, e)) for e in range(3)]
  assert {x.episode_id for x in leases} == {1}
  await put(queue, leases[1], 1, stop_reason='env_error')
  await put(queue, leases[0], 0)
  await put(queue, leases[2], 2, rows=[row(9, 2, is_greedy=True)])
  (group,) = await soon(queue.get_batch(1, 0))  # min_group_size is of the sampled ones
  assert [r.sample_index for r in group] == [0, 2]
  with pytest.raises(ValueError, match='keep_failed'):
    GroupQueue(greedy=True, keep_failed=True)


async def test_what_does_not_expire_is_kept_whatever_its_age():
  for expires, left in ((True, [3]), (False, [0])):
    queue = GroupQueue(
      num_groups=1,
      num_env_groups=2,
      in_order=False,
      expires=expires,
      options=QueueOptions(async_ratio=1.0),
    )
    await queue.advance_step(0)
    slow = await soon(queue.get_episode_id(0, 0))
    await queue.advance_step(2)
    if expires:  # another has come in its place
      slow = await soon(queue.get_episode_id(1, 0))
    assert await put(queue, slow)
    (group,) = await soon(queue.get_batch(1, 2))
    assert [group[0].episode_id + slow.env_group] == left, expires
    assert queue.counts['expired'] == (2 if expires else 0)


async def test_a_group_in_play_is_given_up_once_a_member_is_too_old():
  queue = GroupQueue(num_groups=1, group_size=2, num_env_groups=1, expires=False)
  await queue.advance_step(3)
  for env_id, version in ((0, 1), (1, 3)):
    lease = await soon(queue.get_episode_id(0, env_id))
    if env_id == 0:
      await put(queue, lease, rows=of_version(version))
  waiting = asyncio.create_task(queue.get_batch(1, 3, min_version=2))
  await asyncio.sleep(0.02)
  _, ((_, env_id, given_up),) = await soon(queue.wait_cancelled(0))
  assert (env_id, given_up.sample_index) == (1, 1)
  assert queue.counts['stale'] == 1 and not waiting.done()
  for env_id in (0, 1):
    again = await soon(queue.get_episode_id(0, env_id))
    assert again.episode_id == 1
    await put(queue, again, env_id, rows=of_version(3, env_id))
  ((first, *_),) = await soon(waiting)
  assert first.weights_version[-1] == 3


async def test_who_takes_a_place_is_heeded_and_not_who_waited_there_before():
  """A worker that died may still be waiting, as far as the queue can tell."""
  queue = GroupQueue(num_groups=1, group_size=1, num_env_groups=1)
  dead = asyncio.create_task(queue.get_episode_id(0, 0))
  await asyncio.sleep(0)
  alive = asyncio.create_task(queue.get_episode_id(0, 0))
  await asyncio.sleep(0)
  await queue.advance_step(0)
  assert await asyncio.wait_for(dead, 5) is None
  assert (await asyncio.wait_for(alive, 5)).sample_index == 0


async def test_what_the_dead_still_put_takes_nobodys_place():
  """A worker that was thought dead ends its episode; its place is another's now."""
  queue = GroupQueue(
    num_groups=1, group_size=2, num_env_groups=1, options=QueueOptions(max_retries=0)
  )
  await queue.advance_step(0)
  dead = [await soon(queue.get_episode_id(0, env_id)) for env_id in (0, 1)]
  for env_id in (0, 1):  # given up one after the other, and taken in another order
    queue._cancel_lease(0, env_id, 'abandoned')
  alive = [await soon(queue.get_episode_id(0, env_id)) for env_id in (1, 0)]
  assert [lease.sample_index for lease in alive] == [0, 1]
  assert not await put(queue, dead[0], 0) and not await put(queue, dead[1], 1)
  assert queue.counts['ignored'] == 2
  assert await put(queue, alive[0], 1) and await put(queue, alive[1], 0)
  (group,) = await soon(queue.get_batch(1, 0))
  assert [played.sample_index for played in group] == [0, 1]
