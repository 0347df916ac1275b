"""Sync styles: when engines get weights, who waits, what an evaluation sees."""

import asyncio

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.device_thread import DeviceThread
from jaxrl.options import ConfigError
from jaxrl.rollout.engine.jax_engine import JaxEngine
from jaxrl.rollout.weights import weight_sync
from jaxrl.rollout.weights.weight_store import InProcessWeightStore, cast_copy
from jaxrl.types import SamplingParams
from tests.calls import parse_sync_policy
from tests.rollout.test_jax_engine import MODEL, prompt, weights_of


class Store:
  """Takes its time: each version arrives when `gate` is set."""

  def __init__(self, slow=False):
    self.begun, self.had, self.calls = [], [], []
    self.gate = asyncio.Event()
    if not slow:
      self.gate.set()

  async def publish(self, version, params):
    self.begun.append(version)
    if version:
      await self.gate.wait()
    if params == 'broken':
      raise OSError('the cable is out')
    self.had.append((version, params))

  async def drain(self):
    self.calls.append('drain')

  async def resume(self):
    self.calls.append('resume')


class Rollouts:
  whole = 0.0

  async def played(self):
    return self.whole


def returning(params):
  async def weights():
    return params

  return weights


async def copy(params):
  return f'copy of {params}' if params != 'broken' else params


def swaps(style, store, rollouts=None):
  return weight_sync.WeightSyncer(
    parse_sync_policy(style),
    store,
    store,
    copy=copy,
    finished_groups=(rollouts or Rollouts()).played,
    num_groups=4,
  )


async def versions(style, steps, rollouts=None, begin=0, rate=4):
  store = Store()
  syncer = swaps(style, store, rollouts)
  for step in range(begin, begin + steps):
    await syncer.maybe_sync(step, returning(f'p{step}'))
    if rollouts:
      rollouts.whole += rate
  await syncer.close()
  return [version for version, _ in store.had], store


async def test_a_fixed_interval_goes_by_the_step_also_after_a_resume():
  assert (await versions('fixed', 4))[0] == [0, 1, 2, 3]
  assert (await versions('fixed(interval=3)', 7))[0] == [0, 3, 6]
  assert (await versions('fixed(interval=3)', 6, begin=4))[0] == [4, 6, 9]


@pytest.mark.parametrize(
  'style, expected',
  [('fixed(interval=3)', [0, 3, 6]), ('trainer(interval=2)', [0, 2, 4, 6])],
)
async def test_weights_are_made_only_when_they_are_handed_over(style, expected):
  syncer, synced = swaps(style, Store()), []
  for step in range(7):

    async def weights(step=step):
      synced.append(step)
      return 'params'

    await syncer.maybe_sync(step, weights)
  assert synced == expected


@pytest.mark.parametrize(
  'style, ahead',
  [('fixed(interval=4)', 0), ('explorer(interval=2)', 0), ('trainer(interval=2)', 1)],
)
async def test_after_steps_that_did_not_play_no_weights_are_too_old(style, ahead):
  """As a warm-up on files has them: an evaluation at 0, then play from step 10 on."""
  rollouts, store = Rollouts(), Store()
  syncer = swaps(style, store, rollouts)
  await syncer.sync_now(0, returning('p0'))
  for step in range(10, 20):
    await syncer.maybe_sync(step, returning(f'p{step}'))
    assert step - syncer.version <= parse_sync_policy(style).max_lag(ahead)
    rollouts.whole += 4
    await asyncio.sleep(0)  # a push that nobody waits for arrives
  assert [version for version, _ in store.had][:2] == [0, 10]


async def test_fixed_steps_that_do_not_play_are_made_up_for_at_the_next_that_does():
  store = Store()
  syncer = swaps('fixed(interval=4)', store)
  for step in (0, 2, 3, 5, 6, 7, 9, 11, 13):
    await syncer.maybe_sync(step, returning(f'p{step}'))
  assert [version for version, _ in store.had] == [0, 5, 9, 13]


@pytest.mark.parametrize('style', ['trainer', 'asynchronous'])
async def test_the_first_step_that_plays_waits_for_its_weights(style):
  store = Store(slow=True)
  syncer = swaps(style, store)
  await syncer.sync_now(0, returning('p0'))
  first = asyncio.create_task(syncer.maybe_sync(10, returning('p10')))
  await asyncio.sleep(0.01)
  assert not first.done()
  store.gate.set()
  await first
  assert syncer.version == 10


async def test_an_explorer_asks_when_it_has_played_its_share():
  assert (await versions('explorer', 4, Rollouts()))[0] == [0, 1, 2, 3]
  assert (await versions('explorer(interval=2)', 6, Rollouts()))[0] == [0, 2, 4]
  assert (await versions('explorer', 7, Rollouts(), rate=2))[0] == [0, 2, 4, 6]


async def test_drained_engines_are_let_go_on_though_publishing_fails():
  _, store = await versions('fixed(drain=True)', 3)
  assert store.calls == ['drain', 'resume'] * 2  # nothing runs before the first
  syncer = swaps('fixed(drain=True)', store)
  await syncer.maybe_sync(5, returning('p5'))
  with pytest.raises(OSError, match='cable'):
    await syncer.maybe_sync(6, returning('broken'))
  assert store.calls[-1] == 'resume' and syncer.version == 5


async def test_a_trainer_goes_on_but_waits_for_the_push_before():
  store = Store(slow=True)
  syncer = swaps('trainer', store)
  await syncer.maybe_sync(0, returning('p0'))
  await syncer.maybe_sync(1, returning('p1'))
  await asyncio.sleep(0)
  assert store.begun == [0, 1] and syncer.metrics(1) == {'sync/lag': 1}
  third = asyncio.create_task(syncer.maybe_sync(2, returning('p2')))
  await asyncio.sleep(0.01)
  assert not third.done() and store.begun == [0, 1]
  store.gate.set()
  await third
  await syncer.sync_now(2, returning('p2'))
  # What goes out on the side is a copy, for the learner donates its own.
  assert store.had == [(0, 'p0'), (1, 'copy of p1'), (2, 'copy of p2')]


async def test_asynchronous_skips_what_is_no_longer_newest():
  store = Store(slow=True)
  syncer = swaps('asynchronous', store)
  for step in range(5):
    await syncer.maybe_sync(step, returning(f'p{step}'))
    await asyncio.sleep(0)
  assert store.begun == [0, 1] and syncer.metrics(4) == {'sync/lag': 4}
  store.gate.set()
  await asyncio.sleep(0.01)
  assert [version for version, _ in store.had] == [0, 1, 4]


async def test_an_evaluation_waits_for_its_own_version_and_no_other_follows():
  store = Store(slow=True)
  syncer = swaps('asynchronous', store)
  for step in range(3):
    await syncer.maybe_sync(step, returning(f'p{step}'))
    await asyncio.sleep(0)
  evaluation = asyncio.create_task(syncer.sync_now(3, returning('p3')))
  await asyncio.sleep(0.01)
  assert not evaluation.done()
  store.gate.set()
  await evaluation
  assert store.had == [(0, 'p0'), (1, 'copy of p1'), (3, 'p3')]
  await asyncio.sleep(0.01)
  assert store.had[-1][0] == syncer.version == 3


@pytest.mark.parametrize('style', ['trainer', 'asynchronous'])
async def test_what_a_push_raises_is_told_at_the_next_step(style):
  syncer = swaps(style, Store())
  await syncer.maybe_sync(0, returning('p0'))
  await syncer.maybe_sync(1, returning('broken'))
  await asyncio.sleep(0.01)
  with pytest.raises(OSError, match='cable'):
    await syncer.maybe_sync(2, returning('p2'))


@pytest.mark.parametrize(
  ('style', 'ahead', 'lag'),
  [
    ('fixed', 0, 0),
    ('fixed(interval=3)', 0, 2),
    (
      'trainer(interval=3)',
      0,
      5,
    ),  # two unsent steps, and the push before is on its way
    ('explorer(interval=2)', 1.5, 4),
    ('asynchronous', 0, None),
  ],
)
def test_how_far_the_engines_weights_may_lag_behind(style, ahead, lag):
  assert parse_sync_policy(style).max_lag(ahead) == lag


@pytest.mark.parametrize(
  'text, message',
  [
    ('explore', "no style 'explore'.*Did you mean 'explorer'"),
    ('fixed(intervall=2)', "no option 'intervall'.*Did you mean 'interval'"),
    ('fixed(interval=0)', 'interval must be at least 1'),
    ('trainer(drain=True)', "no option 'drain'"),
  ],
)
def test_what_is_no_style_is_refused(text, message):
  with pytest.raises(ConfigError, match=message):
    parse_sync_policy(text)


@pytest.mark.parametrize('style', ['fixed', 'trainer', 'asynchronous'])
async def test_an_evaluations_tokens_carry_one_version(style):
  """On the real engine, with requests of training in flight and pushes on their way."""
  device_thread = DeviceThread()
  engine = JaxEngine(
    MODEL, device_thread=device_thread, max_num_seqs=4, max_length=64, decode_steps=2,
    prompt_buckets=[64], prefill_tokens=64,
  )  # fmt: skip
  store = InProcessWeightStore(engine, device_thread=device_thread)

  async def clone(params):
    return await device_thread.run(cast_copy, params)

  syncer = weight_sync.WeightSyncer(
    parse_sync_policy(style),
    store,
    engine,
    copy=clone,
    finished_groups=Rollouts().played,
    num_groups=4,
  )
  ask = SamplingParams(max_tokens=48, seed=1)
  await syncer.maybe_sync(0, returning(weights_of(0)))
  training = asyncio.create_task(engine.generate('train', prompt(0, 5), ask))
  await asyncio.sleep(0.02)
  for step in (1, 2, 3):
    await syncer.maybe_sync(step, returning(weights_of(step % 2)))
  await syncer.sync_now(4, returning(weights_of(0)))
  names = [f'eval{i}' for i in range(6)]
  completions = await asyncio.gather(
    *(engine.generate(name, prompt(i, 5), ask) for i, name in enumerate(names))
  )
  await training
  await syncer.close()
  device_thread.close()
  assert all(set(one.weights_versions.tolist()) == {4} for one in completions)


async def test_a_copy_outlives_what_it_was_made_of():
  device_thread = DeviceThread()
  params = {'w': jnp.arange(4.0)}
  kept = await device_thread.run(cast_copy, params)
  params['w'].delete()
  np.testing.assert_array_equal(kept['w'], [0, 1, 2, 3])
  device_thread.close()
