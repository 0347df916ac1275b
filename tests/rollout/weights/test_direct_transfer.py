"""Weights that are sent to engines: to whom, and what is done when one is lost."""

import asyncio
import threading

import pytest

from jaxrl.rollout.engine.actor_proxy import EngineDeadError
from jaxrl.rollout.weights.direct_transfer import (
  DirectWeightStore,
  TransferOptions,
  TransferReport,
  TransferTarget,
  make_engine_caller,
)
from jaxrl.rollout.weights.transport import WeightsError


class Engine:
  def __init__(self, key):
    self._key, self.gone = key, False

  def key(self):
    return self._key

  async def health(self, limit):
    if self.gone:
      raise EngineDeadError('its process has died')
    return ''


class Learner:
  """Stands where parameters are pushed. wrong: answers that differ, by their number."""

  def __init__(self, step=0):
    self.step, self.pushed = step, []
    self.wrong, self.seconds = set(), 0.0
    self.error: Exception | None = None

  async def push(self, version, targets, backend, sending):
    await asyncio.sleep(self.seconds)
    if self.error:
      raise self.error
    version = self.step if version is None else version
    self.pushed.append((version, [target.engine.key() for target in targets]))
    right = f'digest {version}'
    held = ['other'] * len(targets) if len(self.pushed) in self.wrong else None
    return TransferReport(version, right, tuple(held or [right] * len(targets)), 12)


def make(count=2, options=TransferOptions(), **errors):
  engines = [Engine(f'e{i}') for i in range(count)]
  targets = [TransferTarget(engine, 2, (i,)) for i, engine in enumerate(engines)]
  return engines, DirectWeightStore(targets, 'nccl', options, **errors)


@pytest.mark.asyncio
async def test_every_version_goes_to_every_engine_that_lives(caplog):
  engines, store = make(3)
  learner = Learner()
  assert store.version is None and store.metrics() == {}
  await store.publish(0, learner)
  engines[1].gone = True
  await store.publish(1, learner)
  assert learner.pushed == [(0, ['e0', 'e1', 'e2']), (1, ['e0', 'e2'])]
  assert 'engine 2 of 3 gets no weights' in caplog.text
  assert store.version == 1 and store.metrics()['weights/bytes'] == 12
  with pytest.raises(ValueError, match='must rise'):
    await store.publish(1, learner)
  with pytest.raises(WeightsError, match='kept nowhere'):
    await store.fetch()


@pytest.mark.asyncio
async def test_an_engine_made_since_is_sent_the_newest_alone():
  engines, store = make()
  learner = Learner()
  await store.catch_up(engines[0], 'engine 1 of 2')  # before there is any
  await store.publish(4, learner)
  learner.step = 5  # it has learned since
  engines[1]._key = 'another'
  await store.catch_up(engines[1], 'engine 2 of 2')
  assert learner.pushed == [(4, ['e0', 'e1']), (5, ['another'])]
  await store.publish(5, learner)
  assert learner.pushed[-1] == (5, ['e0', 'another'])


@pytest.mark.asyncio
async def test_a_version_waits_where_no_engine_lives():
  (engine,), store = make(1)
  engine.gone, learner = True, Learner(3)
  await store.publish(3, learner)
  assert not learner.pushed and store.version == 3
  engine.gone = False
  await store.catch_up(engine, 'engine 1 of 1')
  assert learner.pushed == [(3, ['e0'])]


@pytest.mark.asyncio
async def test_what_arrives_otherwise_is_sent_again_once():
  _, store = make(1)
  learner = Learner()
  learner.wrong = {1}
  await store.publish(0, learner)
  assert len(learner.pushed) == 2
  learner.wrong = {3, 4}
  pattern = r'engine 1 of 1 .* twice: version 1, digest other, where digest 1 was sent'
  with pytest.raises(WeightsError, match=pattern):
    await store.publish(1, learner)


class Lost(Exception):
  pass


@pytest.mark.asyncio
@pytest.mark.parametrize('slow', [False, True])
async def test_an_engine_lost_while_it_is_sent_to_ends_it(slow):
  options = TransferOptions(patience=0.05 if slow else 60.0)
  _, store = make(options=options, engine_lost_error=Lost)
  learner = Learner()
  learner.seconds = 60.0 if slow else 0.0
  learner.error = EngineDeadError('it was killed')
  reason = 'not all engines had it within 0.05 s' if slow else 'it was killed'
  with pytest.raises(Lost, match=f'resumes from the last checkpoint .{reason}'):
    await store.publish(0, learner)


@pytest.mark.asyncio
async def test_engines_are_asked_from_a_thread():
  class Remote:
    def __init__(self, factor):
      self.factor = factor

    async def times(self, number):
      assert threading.current_thread() is main
      return self.factor * number

  main = threading.current_thread()
  ask = make_engine_caller(asyncio.get_running_loop())
  engines = [Remote(2), Remote(3)]
  assert await asyncio.to_thread(ask, engines, 'times', [(5,), (7,)]) == [10, 21]
