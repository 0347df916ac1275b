"""The loop on its own: its order, its early stops, and workers that die or end."""

import asyncio
import time

import pytest

from jaxrl import loop
from jaxrl.rollout.queue.group_pipeline import StopRequested

GROUP = ['a trajectory']


class Learner:
  def __init__(self, step=0):
    self.step, self.params = step, {}

  async def update(self, groups):
    self.step += 1
    return {'loss/total': 0.5}


class Parts:
  """Hooks and sampler that note what is called. stop_at: the call that stops it."""

  def __init__(self, groups=(GROUP,), stop_at=None, evaluates=()):
    self.calls, self.rows = [], {}
    self._groups, self._stop_at, self._evaluates = list(groups), stop_at, evaluates

  def _note(self, *call):
    self.calls.append(call)

  async def publish(self, step):
    self._note('publish', step)

  async def advance(self, step):
    self._note('advance', step)

  async def evaluate(self, step, last):
    self._note('evaluate', step)
    return {'eval/x/mean': float(step)} if step in self._evaluates else {}

  def record(self, step, metrics, groups):
    self._note('record', step)
    self.rows[step] = metrics, groups

  async def save(self, step, last):
    self._note('save', step, last)

  def stop(self):
    return self._stop_at in self.calls

  async def next(self, step):
    self._note('next', step)
    return self._groups

  def hooks(self):
    names = 'publish advance evaluate record save stop'.split()
    return loop.Hooks(**{name: getattr(self, name) for name in names})

  async def train(self, num_steps, workers=(), start=0):
    learner = Learner(start)
    return await loop.train(
      learner, self, self.hooks(), num_steps=num_steps, workers=workers
    )


async def test_the_order_of_a_step_and_of_the_end():
  parts = Parts(evaluates=(0, 2))
  assert await parts.train(2)
  names = 'publish evaluate advance next record'.split()
  one, two = ([(name, step) for name in names] for step in (0, 1))
  assert parts.calls == [
    *one, ('save', 1, False), *two, ('save', 2, False),
    ('publish', 2), ('evaluate', 2), ('record', 2), ('save', 2, True),
  ]  # fmt: skip
  assert parts.rows[0] == ({'loss/total': 0.5, 'eval/x/mean': 0.0}, [GROUP])
  assert parts.rows[1] == ({'loss/total': 0.5}, [GROUP])
  assert parts.rows[2] == ({'eval/x/mean': 2.0}, [])


async def test_it_goes_on_from_the_learners_step():
  parts = Parts()
  assert await parts.train(3, start=2)
  assert [step for name, step, *_ in parts.calls if name == 'record'] == [2]


@pytest.mark.parametrize(
  'stop_at, saved',
  [
    (('publish', 0), 0),
    (('evaluate', 0), 0),
    (('next', 0), 1),
    (('record', 0), 1),
    (('record', 2), 3),
  ],
)
async def test_a_stop_waits_for_the_step_at_hand_and_checkpoints(stop_at, saved):
  parts = Parts(stop_at=stop_at)
  assert not await parts.train(3)
  assert parts.calls[-1] == ('save', saved, True)
  assert len(parts.rows) == saved
  assert ('publish', saved) not in parts.calls or saved == 0


async def never():
  await asyncio.Event().wait()


async def dies():
  await asyncio.sleep(0.02)
  raise ValueError('the worker broke')


class Waiting(Parts):
  async def next(self, step):
    await never()


async def test_a_workers_error_ends_the_run_at_once():
  workers = [asyncio.create_task(never()), asyncio.create_task(dies())]
  start = time.monotonic()
  with pytest.raises(ValueError, match='the worker broke'):
    await Waiting().train(1, workers)
  assert time.monotonic() - start < 2


async def test_a_worker_that_died_while_no_one_looked_is_found_at_once():
  worker = asyncio.create_task(dies())
  await asyncio.wait({worker})
  parts = Parts()
  with pytest.raises(ValueError, match='the worker broke'):
    await parts.train(1, [worker, asyncio.create_task(never())])
  assert not parts.rows


async def test_groups_that_no_one_is_left_to_play_are_an_error(monkeypatch):
  monkeypatch.setattr(loop, 'DRAIN_TIMEOUT_S', 0.05)
  worker = asyncio.create_task(asyncio.sleep(0))
  with pytest.raises(RuntimeError, match='every environment worker has ended'):
    await Waiting().train(1, [worker])
  with pytest.raises(RuntimeError, match='no groups to learn from'):
    await Parts(groups=()).train(1, [worker])


async def test_the_last_groups_are_learned_from_though_all_workers_have_ended():
  class Late(Parts):
    async def next(self, step):
      await asyncio.sleep(0.05)
      return self._groups

    async def evaluate(self, step, last):
      await asyncio.sleep(0.05)
      return {}

  worker = asyncio.create_task(asyncio.sleep(0))
  assert await Late().train(2, [worker])


async def test_an_error_of_long_work_keeps_the_place_where_it_arose():
  async def play():
    raise KeyError('late')

  with pytest.raises(KeyError) as info:
    await loop.await_unless_stopped(play(), lambda: False)
  assert info.traceback[-1].name == 'play'


async def test_long_work_is_cancelled_once_the_run_should_end():
  ended = []

  async def play():
    try:
      await asyncio.sleep(60)
    finally:
      ended.append(True)

  start = time.perf_counter()
  with pytest.raises(StopRequested):
    await loop.await_unless_stopped(play(), lambda: True)
  assert ended and time.perf_counter() - start < 5
