"""Engines that die, hang or break are replaced, and their requests go on."""

import asyncio
import functools
import itertools
import logging
import os
import signal

import numpy as np
import pytest

from jaxrl.options import ConfigError
from jaxrl.rollout.engine.actor_proxy import EngineDeadError, maybe_await
from jaxrl.rollout.engine.router import EngineRouter
from jaxrl.rollout.weights.verified_store import LoadCoordinator
from jaxrl.types import SamplingParams
from launch.runtime.engine_pool import EnginePool
from launch.runtime.ray_engines import EngineActor
from launch.runtime.supervision import ActorError
from tests.launch import runs
from tests.launch.runtime.test_ray_runtime import OPTIONS, RAY
from tests.launch.runtime.tiny import Tiny

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group('ray')]
NEW, HELD = 40, 10
GROUPS = itertools.count()


@pytest.fixture
def make(ray, tmp_path):
  """Makes fleets of tiny engines; ends them."""
  pools = []

  def fleet(count=2, restarts=3, **options):
    actor = ray.remote(Tiny).options(max_concurrency=100, num_cpus=0)

    def start(number):
      return actor.remote(tmp_path, **options)

    limits = {'hang': 5.0, 'interval': 0.1, 'backoff': 0.01}
    pools.append(EnginePool(start, count, restarts=restarts, **limits))
    return pools[-1]

  yield fleet
  for one in pools:
    one.close()


def requests(router, count=4):
  """Of as many groups that nobody has served, NEW tokens each."""
  rules = [SamplingParams(NEW, seed=seed) for seed in range(count)]
  names = [f'math/{next(GROUPS)}/0/0' for _ in range(count)]
  pairs = zip(names, rules, strict=True)
  return [asyncio.create_task(router.generate(name, [7], rule)) for name, rule in pairs]


async def held(fleet, router, count=4):
  """Begins `requests`, and waits until the router knows of HELD tokens of each."""
  for handle in fleet.handles:
    await handle.hold(HELD)
  jobs = requests(router, count)

  async def known():
    calls = router._requests.values()
    return len(calls) == count and all(
      c.partial and len(c.partial.tokens) == HELD for c in calls
    )

  await until(known)
  return jobs


async def whole(jobs):
  """Waits for `requests`, and checks that they are as without any loss."""
  results = await asyncio.wait_for(asyncio.gather(*jobs), 60)
  for seed, done in enumerate(results):
    assert done.tokens.tolist() == [100 * seed + place for place in range(NEW)]
    np.testing.assert_array_equal(done.logprobs, -done.tokens / 7)
    assert len(done.weights_versions) == NEW and done.finish_reason == 'length'
  return results


async def until(condition, seconds=60):
  async with asyncio.timeout(seconds):
    while not await condition():
      await asyncio.sleep(0.05)


async def pid(handle):
  try:
    return (await handle.about())['pid']
  except EngineDeadError:
    return None


def serving(fleet, pulls):
  """A router of the fleet's, and the fleet told of it."""
  router = EngineRouter(fleet.handles, poll_interval=0.05)
  fleet.set_callbacks(rejoin=router.replace, catch_up=pulls.catch_up)
  return router


async def test_whatever_befalls_an_engine_its_requests_go_on(make, caplog):
  caplog.set_level(logging.INFO)
  fleet = make(restarts=10)
  pulls = LoadCoordinator(fleet.handles)
  router = serving(fleet, pulls)
  victim, other = fleet.handles

  async def story():
    await pulls.load(3, 'digest 3')
    blows = {
      'process has died': lambda old: os.kill(old, signal.SIGKILL),
      'has not answered for 5 s': lambda old: os.kill(old, signal.SIGSTOP),
      'OSError: on fire': lambda old: victim.spoil(broken='on fire'),
      'a dispatch has taken more than 5 s': lambda old: victim.spoil(
        seconds_since_progress=9.0
      ),
    }
    for reason, blow in blows.items():
      old = await pid(victim)
      jobs = await held(fleet, router)
      caplog.clear()
      await maybe_await(blow(old))
      await other.hold(None)
      results = await whole(jobs)
      assert {int(v) for done in results for v in done.weights_versions} == {3}
      moved = router._counts.pop('rollout/requests_moved')
      assert moved >= 2 and router._counts.pop('rollout/tokens_kept') >= 2 * HELD
      await until(lambda: _is_logged(caplog, 'engine 1 of 2 is back'))
      assert await pid(victim) != old
      assert (await victim.about())['version'] == 3
      (lost,) = [line for line in caplog.messages if '1 of 2 was lost' in line]
      assert reason in lost
    return 'told'

  assert await fleet.supervise(story()) == 'told'


async def _is_logged(caplog, text):
  return any(text in line for line in caplog.messages)


@pytest.mark.slow
async def test_all_may_die_at_once(make):
  fleet = make()
  pulls = LoadCoordinator(fleet.handles)
  router = serving(fleet, pulls)

  async def story():
    await pulls.load(1, 'digest 1')
    jobs = await held(fleet, router)
    for old in [await pid(handle) for handle in fleet.handles]:
      os.kill(old, signal.SIGKILL)
    await whole(jobs)
    assert router._counts['rollout/tokens_kept'] == 4 * HELD

  await fleet.supervise(story())


@pytest.mark.slow
async def test_one_that_dies_while_weights_come_gets_them_later(make, caplog):
  fleet = make()
  pulls = LoadCoordinator(fleet.handles)
  router = serving(fleet, pulls)

  async def story():
    await pulls.load(1, 'digest 1')
    jobs = await held(fleet, router)
    coming = asyncio.create_task(pulls.load(2, 'digest 2'))
    old = await pid(fleet.handles[1])
    await until(lambda: _pulling(fleet.handles[1]))
    os.kill(old, signal.SIGKILL)
    await asyncio.wait_for(coming, 30)  # the others have it: the run goes on
    assert (await fleet.handles[0].about())['version'] == 2
    await fleet.handles[0].hold(None)
    results = await whole(jobs)
    for done in results:
      assert set(done.weights_versions[:HELD]) == {1} and done.weights_versions[-1] == 2
      assert np.all(np.diff(done.weights_versions) >= 0)
    await until(lambda: _version(fleet.handles[1], 2))

  await fleet.supervise(story())
  assert any('it is gone' in line for line in caplog.messages)


async def _pulling(handle):
  return (await handle.about())['pulling']


async def _version(handle, version):
  return await pid(handle) and (await handle.about())['version'] == version


@pytest.mark.slow
@pytest.mark.extended
async def test_one_that_dies_at_each_start_is_given_up(make, tmp_path):
  fleet = make(1, restarts=2, deaths=99)
  with pytest.raises(ActorError, match='all engines are lost') as error:
    await asyncio.wait_for(fleet.supervise(asyncio.Event().wait()), 60)
  assert len(list(tmp_path.iterdir())) == 3
  assert '\n' not in str(error.value) and 'resumes' in str(error.value)
  assert fleet.failure() is not None


@pytest.mark.slow
@pytest.mark.extended
async def test_one_that_starts_in_the_end_serves(make, tmp_path):
  fleet = make(1, restarts=2, deaths=2)
  router = serving(fleet, LoadCoordinator(fleet.handles))
  await fleet.supervise(whole(requests(router, 1)))
  assert len(list(tmp_path.iterdir())) == 3


async def test_one_that_refuses_to_be_made_is_not_made_again(make, tmp_path):
  fleet = make(1, error='no such bucket')
  with pytest.raises(ConfigError, match=r'no engine can be made: .*no such bucket'):
    await asyncio.wait_for(fleet.supervise(asyncio.Event().wait()), 60)
  assert len(list(tmp_path.iterdir())) == 1


async def test_what_is_guarded_may_raise_or_be_cancelled(make):
  fleet = make(1)

  async def fails():
    raise KeyError('own')

  with pytest.raises(KeyError, match='own'):
    await fleet.supervise(fails())
  ended = asyncio.Event()

  async def waits():
    try:
      await asyncio.Event().wait()
    finally:
      ended.set()

  job = asyncio.create_task(fleet.supervise(waits()))
  await asyncio.sleep(0.05)
  job.cancel()
  with pytest.raises(asyncio.CancelledError):
    await job
  assert ended.is_set()


# ---- in a training run


def mortal(mark, since=1):
  """A slow engine. The first that has six tokens of a request dies, with `mark`.

  since: the version before which none does; the first of training.
  """

  class Mortal(EngineActor):
    async def _step(self):
      await super()._step()
      begun = self.version is not None and self.version >= since
      await asyncio.sleep(0.5 if begun and not os.path.exists(mark) else 0)
      longest = max((len(r.tokens) for r in self._requests.values()), default=0)
      if begun and longest >= 6 and not os.path.exists(mark):
        open(mark, 'x').close()
        os.kill(os.getpid(), signal.SIGKILL)

  return Mortal


@pytest.mark.slow
def test_training_goes_on_as_if_no_engine_had_died(
  ray, local, tmp_path, monkeypatch, capsys
):
  from launch.runtime import ray_runtime

  _, undisturbed = local
  mark = tmp_path / 'killed'
  monkeypatch.setattr(ray_runtime, 'EngineActor', mortal(str(mark)))
  # The other engine ends this short run in less than the usual second between checks.
  pool = functools.partial(EnginePool, interval=0.05)
  monkeypatch.setattr(ray_runtime, 'EnginePool', pool)
  router = ray_runtime.RayRuntime.make_router
  monkeypatch.setattr(
    ray_runtime.RayRuntime,
    'make_router',
    lambda self, engines, **options: router(
      self, engines, poll_interval=0.05, **options
    ),
  )
  engines = '--config.cluster.num_engines=2'
  recorder = runs.record(tmp_path, *OPTIONS, *RAY, engines)
  assert mark.exists()
  assert [step for step, _ in recorder.metrics] == [
    step for step, _ in undisturbed.metrics
  ]
  assert sum(row.get('rollout/requests_moved', 0) for _, row in recorder.metrics) > 0
  assert sum(row.get('rollout/tokens_kept', 0) for _, row in recorder.metrics) > 0
  for (step, kind, groups, _), (step_, kind_, groups_, _) in zip(
    undisturbed.played, recorder.played, strict=True
  ):
    assert (step, kind) == (step_, kind_)
    rows, rows_ = ([r for group in g for r in group] for g in (groups, groups_))
    assert [r.trajectory_id for r in rows] == [r.trajectory_id for r in rows_]
    for row, row_ in zip(rows, rows_, strict=True):
      for name in 'tokens action_mask rewards weights_version'.split():
        np.testing.assert_array_equal(getattr(row, name), getattr(row_, name))
      # What was taken up has keys and values from prefill: the same but for rounding.
      np.testing.assert_allclose(row.rollout_logprobs, row_.rollout_logprobs, atol=2e-5)
  lines = ''.join(capsys.readouterr()).splitlines()
  lost = [line for line in lines if 'was lost' in line]
  assert len(lost) == 1 and ' of 2 was lost and is being restarted' in lost[0]
