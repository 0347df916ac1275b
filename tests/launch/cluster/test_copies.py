"""How many copies of its parameters a learner in actors keeps for publishing."""

import asyncio

import numpy as np
import pytest

from jaxrl.rollout import sync
from launch.cluster.learners import LearnerActor
from launch.cluster.remote_params import RemoteParams


class Weights:
  """Keeps what was published. digest, metrics: as `BroadcastWeights` has them."""

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

  async def weights(self):
    return self.params


@pytest.fixture
def actor():
  made = LearnerActor(None, None)  # pyright: ignore
  made._learner = Learner()  # pyright: ignore
  made._weights = Weights()  # pyright: ignore
  yield made
  made._dispatcher.close()


def learn(actor, value):
  actor._learner.params = {'w': np.full(1, value)}


async def test_a_copy_goes_when_nobody_holds_on_to_it(actor):
  newest = RemoteParams([actor], asyncio.Lock())
  pushing = await newest.hold()
  for value in range(1, 4):
    learn(actor, value)
    waiting = None  # as `sync.Swaps` does before it asks for another
    waiting = await newest.hold()
    assert len(actor._held) == 2
  await pushing.publish(1, None, None)  # pyright: ignore
  assert len(actor._held) == 1
  await waiting.publish(4, None, None)  # pyright: ignore
  assert actor._held == {}
  assert actor._weights.had == [(1, 0), (4, 3)]


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
  made = sync.Swaps(
    sync.parse('asynchronous'),
    store,  # pyright: ignore
    store,  # pyright: ignore
    copy=lambda params: params.hold(),
    played=None,  # pyright: ignore
    num_groups=4,
  )

  async def weights():
    return newest

  kept = []
  for step in range(6):
    learn(actor, step)
    await made.at(step, weights)
    await asyncio.sleep(0)
    kept.append(len(actor._held))
  assert kept == [0, 1, 2, 2, 2, 2]
  store.gate.set()
  await asyncio.sleep(0.01)
  assert actor._held == {} and actor._weights.had == [(0, 0), (1, 1), (5, 5)]
  await made.close()


async def test_the_newest_makes_all_copies_old(actor):
  newest = RemoteParams([actor], asyncio.Lock())
  waiting = await newest.hold()
  learn(actor, 5)
  await newest.publish(5, None, None)  # pyright: ignore
  assert actor._held == {} and actor._weights.had == [(5, 5)]
  assert waiting is not None
