"""The engine pool without Ray: how its watch ends."""

import asyncio
import types

import pytest

from jaxrl.rollout.engine.actor_proxy import EngineDeadError
from launch.runtime import engine_pool
from launch.runtime.engine_pool import EnginePool


class Answers:
  """An actor whose health checks are answered when the test says so."""

  def __init__(self):
    self.pending = []
    self.health = types.SimpleNamespace(remote=self._ask)

  def _ask(self, limit):
    self.pending.append(asyncio.get_running_loop().create_future())
    return self.pending[-1]


@pytest.mark.parametrize('ticks', range(6))
async def test_the_pool_ends_with_its_work_whenever_an_answer_comes(ticks):
  """A cancelled watch ends, even if its engine answers at that very moment.

  `asyncio.wait_for` of Python 3.11 loses such a cancellation, and the run never ends.
  """
  actor = Answers()
  pool = EnginePool(lambda number: actor, 1, interval=0.001)

  def answer_in(ticks):
    if ticks:
      asyncio.get_running_loop().call_soon(answer_in, ticks - 1)
    else:
      actor.pending[-1].set_result('')

  async def work():
    while not actor.pending:
      await asyncio.sleep(0)
    answer_in(ticks)
    return 'done'

  task = asyncio.create_task(pool.supervise(work()))
  done, _ = await asyncio.wait({task}, timeout=5)
  assert done, 'the pool still watches its engine'
  assert task.result() == 'done'


class Ending:
  """An actor that is found lost at once, until it is told to live."""

  def __init__(self, number):
    self.number, self.lives = number, False
    self.health = types.SimpleNamespace(remote=self._health)
    self.begun = 0

  async def _health(self, limit):
    self.begun += 1
    if self.begun > 1 and not self.lives:  # the pool asks once when it starts it
      raise OSError('the actor died')
    return ''


@pytest.mark.parametrize('is_excused', [True, False])
async def test_losses_that_hosts_are_to_blame_for_do_not_count(monkeypatch, is_excused):
  """An engine that was moved, or lost with its host, ten times is not given up."""
  monkeypatch.setattr(engine_pool, '_kill', lambda actor: None)
  made, forgotten = [], []

  def start(number):
    made.append(Ending(len(made)))
    made[-1].lives = len(made) > 10
    return made[-1]

  pool = EnginePool(
    start,
    2,
    interval=0.001,
    backoff=0.0,
    host_is_lost=lambda actor: is_excused,
    forget=forgotten.append,
  )
  made[1].lives = True

  async def work():
    while len(made) <= 10 and not forgotten:
      await asyncio.sleep(0.001)

  await asyncio.wait_for(pool.supervise(work()), 60)
  assert (len(made) > 10) == is_excused
  # What is given up is no part that could be moved to another host.
  assert forgotten == ([] if is_excused else [pool.actors[0]])


async def test_a_handle_that_is_rebound_while_it_waits_ends_the_actor_it_asked(
  monkeypatch,
):
  """The watch may find the loss first; there is then no actor in the handle."""
  from ray.exceptions import ActorUnavailableError

  handle, killed = None, []

  class Lost:
    def __init__(self):
      self.pull = types.SimpleNamespace(remote=self._pull)

    async def _pull(self):
      handle.rebind(None)
      raise ActorUnavailableError('it cannot be reached', None)

  actor = Lost()
  handle = engine_pool.EngineHandle(actor)
  monkeypatch.setattr(engine_pool, '_kill', killed.append)
  with pytest.raises(EngineDeadError):
    await handle.pull()
  assert killed == [actor]
