"""How many copies of its parameters a learner in actors keeps for publishing."""

import asyncio

import numpy as np
import pytest

from jaxrl.rollout.weights import weight_sync
from launch.runtime.learner_actor import LearnerActor
from launch.runtime.remote_learner import RemoteParams
from tests.calls import parse_sync_policy


class Weights:
  """Keeps what was published. digest, metrics: as `WeightPublisher` has them."""

  digest = 'digest'

  def __init__(self):
    self.had = []

  def metrics(self):
    return {}

  async def publish(self, version, params):
    self.had.append((version, int(params['w'][0])))


class Learner:
  def __init__(self):
    self.params = {'w': np.zeros(1)}

  async def inference_params(self):
    return self.params


@pytest.fixture
def actor():
  learner_actor = LearnerActor(None, None, None)  # pyright: ignore
  learner_actor._learner = Learner()  # pyright: ignore
  learner_actor._publisher = Weights()  # pyright: ignore
  yield learner_actor
  learner_actor._device_thread.close()


def learn(actor, value):
  actor._learner.params = {'w': np.full(1, value)}


async def test_a_copy_goes_when_nobody_holds_on_to_it(actor):
  newest = RemoteParams([actor], asyncio.Lock())
  pushing = await newest.snapshot()
  for value in range(1, 4):
    learn(actor, value)
    waiting = None  # as `WeightSyncer` does before it asks for another
    waiting = await newest.snapshot()
    assert len(actor._snapshots) == 2
  await pushing.publish(1, None, None)  # pyright: ignore
  assert len(actor._snapshots) == 1
  await waiting.publish(4, None, None)  # pyright: ignore
  assert actor._snapshots == {}
  assert actor._publisher.had == [(1, 0), (4, 3)]


class Store:
  """Publishes by `RemoteParams`, and takes its time over version 1."""

  def __init__(self):
    self.gate = asyncio.Event()

  async def publish(self, version, params):
    if version == 1:
      await self.gate.wait()
    await params.publish(version, None, None)


async def test_while_a_push_is_slow_one_more_copy_waits_and_no_others(actor):
  store, newest = Store(), RemoteParams([actor], asyncio.Lock())
  syncer = weight_sync.WeightSyncer(
    parse_sync_policy('asynchronous'),
    store,  # pyright: ignore
    store,  # pyright: ignore
    copy=lambda params: params.snapshot(),
    finished_groups=None,  # pyright: ignore
    num_groups=4,
  )

  async def weights():
    return newest

  kept = []
  for step in range(6):
    learn(actor, step)
    await syncer.maybe_sync(step, weights)
    await asyncio.sleep(0)
    kept.append(len(actor._snapshots))
  assert kept == [0, 1, 2, 2, 2, 2]
  store.gate.set()
  await asyncio.sleep(0.01)
  assert actor._snapshots == {} and actor._publisher.had == [(0, 0), (1, 1), (5, 5)]
  await syncer.close()


async def test_the_newest_makes_all_copies_old(actor):
  newest = RemoteParams([actor], asyncio.Lock())
  waiting = await newest.snapshot()
  learn(actor, 5)
  await newest.publish(5, None, None)  # pyright: ignore
  assert actor._snapshots == {} and actor._publisher.had == [(5, 5)]
  assert waiting is not None
