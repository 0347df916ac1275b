"""Abort, pause, new weights, errors, compilation: the engine under control."""

import asyncio
import threading

import jax
import numpy as np
import pytest

from jaxrl.device_thread import DeviceThread
from jaxrl.models import layer_stack
from jaxrl.rollout.engine.jax_engine import JaxEngine
from jaxrl.types import SamplingParams
from tests.rollout.test_jax_engine import MODEL, prompt, rescored, same, weights_of

LONG = SamplingParams(max_tokens=50, seed=1)


@pytest.fixture(scope='module', params=[1, 2])
def shared(request):
  device_thread = DeviceThread()
  yield JaxEngine(
    MODEL,
    device_thread=device_thread,
    max_num_seqs=2,
    decode_threads=request.param,
    max_length=64,
    decode_steps=2,
    prompt_buckets=[64],
    prefill_tokens=64,
  )
  device_thread.close()


@pytest.fixture
async def engine(shared):
  await shared.load(0, weights_of(0))
  yield shared
  assert shared._task is None or shared._task.done()
  assert (
    not shared._requests
    and not shared._scheduler.waiting
    and not shared._scheduler.num_busy
  )


async def until(condition, seconds=20.0):
  async with asyncio.timeout(seconds):
    while not condition():
      await asyncio.sleep(0.001)


def started(engine, name, count=1):
  def check():
    request = engine._requests.get(name)
    return request is not None and len(request.tokens) >= count

  return check


async def test_abort_at_once_is_not_missed(engine):
  """Between registration and dispatch there is no gap to fall into."""
  job = asyncio.create_task(engine.generate('a', prompt(0, 5), LONG))
  await asyncio.sleep(0)
  await engine.abort('a')
  done = await job
  assert done.finish_reason == 'abort' and len(done.tokens) == 0
  assert done.logprobs.shape == done.weights_versions.shape == (0,)


@pytest.mark.parametrize('turns', range(8))
async def test_abort_at_any_moment(engine, turns):
  free = await engine.generate('free', prompt(0, 5), LONG)
  jobs = [
    asyncio.create_task(engine.generate(f'{i}', prompt(i % 2, 5), LONG))
    for i in range(4)
  ]
  for _ in range(turns):
    await asyncio.sleep(0.0005 * turns)
  await engine.abort('0')
  await engine.abort('3')
  await engine.abort('3')
  await engine.abort('unknown')
  done = await asyncio.wait_for(asyncio.gather(*jobs), 30)
  for i in (0, 3):
    assert done[i].finish_reason in ('abort', 'length')
  np.testing.assert_array_equal(done[0].tokens, free.tokens[: len(done[0].tokens)])
  same(done[2], free)
  assert len(done[1].tokens) == 50


async def test_a_cancelled_caller_leaves_nothing_behind(engine):
  job = asyncio.create_task(engine.generate('a', prompt(0, 5), LONG))
  await until(started(engine, 'a'))
  job.cancel()
  with pytest.raises(asyncio.CancelledError):
    await job
  assert 'a' not in engine._requests
  assert (await engine.generate('a', prompt(0, 5), LONG)).finish_reason == 'length'


async def test_one_id_is_one_request(engine):
  ids = prompt(0, 5)
  jobs = [asyncio.create_task(engine.generate('a', ids, LONG)) for _ in range(3)]
  await asyncio.sleep(0)
  with pytest.raises(ValueError, match="'a' is being served"):
    await engine.generate('a', ids, SamplingParams(max_tokens=50, seed=2))
  with pytest.raises(ValueError, match="'a' is being served"):
    await engine.generate('a', prompt(1, 5), LONG)
  jobs[0].cancel()
  engine.metrics()
  one, two = await asyncio.gather(*jobs[1:])
  same(one, two)
  assert engine.metrics()['tokens/generated'] <= 50


async def test_pause_keeps_requests(engine):
  free = await engine.generate('free', prompt(0, 5), LONG)
  job = asyncio.create_task(engine.generate('a', prompt(0, 5), LONG))
  await until(started(engine, 'a', 4))
  await engine.pause()
  count = len(engine._requests['a'].tokens)
  late = asyncio.create_task(engine.generate('b', prompt(0, 5), LONG))
  await asyncio.sleep(0.05)
  assert not job.done() and not late.done()
  assert len(engine._requests['a'].tokens) == count < 50
  await engine.resume()
  same(await job, free)
  same(await late, free)


async def test_abort_while_paused(engine):
  job = asyncio.create_task(engine.generate('a', prompt(0, 5), LONG))
  await until(started(engine, 'a', 4))
  await engine.pause()
  await engine.abort('a')
  assert (await job).finish_reason == 'abort'
  await engine.resume()


async def test_resume_during_the_last_landing_is_heard(engine):
  for _ in range(5):
    job = asyncio.create_task(engine.generate('a', prompt(0, 5), LONG))
    await until(started(engine, 'a', 2))
    pausing = asyncio.create_task(engine.pause())
    await asyncio.sleep(0)
    await engine.resume()
    await asyncio.wait_for(pausing, 30)
    assert (await asyncio.wait_for(job, 30)).finish_reason == 'length'


async def test_new_weights_take_over_in_flight(engine):
  ids = prompt(0, 5)
  old = await engine.generate('old', ids, LONG)
  job = asyncio.create_task(engine.generate('a', ids, LONG))
  await until(started(engine, 'a', 4))
  await engine.load(7, weights_of(1))
  done = await job
  assert engine.version == 7
  switch = int(np.sum(done.weights_versions == 0))
  assert 4 <= switch < 50
  np.testing.assert_array_equal(
    done.weights_versions, [0] * switch + [7] * (50 - switch)
  )
  np.testing.assert_array_equal(done.tokens[:switch], old.tokens[:switch])
  np.testing.assert_array_equal(done.logprobs[:switch], old.logprobs[:switch])
  fresh = await engine.generate('b', ids, LONG)
  np.testing.assert_array_equal(fresh.weights_versions, [7] * 50)
  expected = rescored(weights_of(1), [*ids, *fresh.tokens], 5)
  np.testing.assert_allclose(fresh.logprobs, expected, atol=2e-5)
  # The old keys and values stay: what follows the switch is neither policy's alone.
  whole = rescored(weights_of(1), [*ids, *done.tokens], 5)
  assert np.abs(done.logprobs[switch:] - whole[switch:]).max() > 1e-3


@pytest.mark.parametrize(
  'requests, most',
  [
    (5, 1),  # two slots, so there is a line: what is on the device is the last
    (1, 2),  # and one more that departed before it landed
  ],
)
async def test_a_load_waits_for_so_many_dispatches_at_most(
  engine, monkeypatch, requests, most
):
  """Until the first token of the new version, counted from where `load` returns."""
  landed, process_results = [], engine._process_results

  def noted(results):
    landed.extend(result.weights_version for result in results)
    process_results(results)

  monkeypatch.setattr(engine, '_process_results', noted)
  for version in range(1, 5):
    del landed[:]
    jobs = [
      asyncio.create_task(engine.generate(f'{i}', prompt(i, 5), LONG))
      for i in range(requests)
    ]
    await until(lambda: len(landed) >= 2)
    assert bool(engine._scheduler.waiting) == (requests > 2)
    await engine.load(version, weights_of(version % 2))
    begun = len(landed)
    counts = {name: len(r.tokens) for name, r in engine._requests.items()}
    results = await asyncio.gather(*jobs)
    assert landed[begun:].index(version) <= most
    for i, done in enumerate(results):
      old = int(np.sum(done.weights_versions == version - 1))
      assert old <= counts.get(f'{i}', old) + 2 * most  # two tokens a dispatch


class Failing:
  """Raises once, on the device thread."""

  def __init__(self, program):
    self.program, self.armed = program, True

  def __call__(self, *args):
    if self.armed:
      self.armed = False
      raise RuntimeError('device on fire')
    return self.program(*args)


async def test_an_error_reaches_every_request(engine, monkeypatch):
  free = await engine.generate('free', prompt(0, 5), LONG)
  jobs = [
    asyncio.create_task(engine.generate(f'{i}', prompt(i, 5), LONG)) for i in range(5)
  ]
  await until(started(engine, '0', 2))
  runner = engine._model_runner
  runner = getattr(runner, 'partition_runner', runner)
  failing = {needs: Failing(run) for needs, run in runner._decode.items()}
  monkeypatch.setattr(runner, '_decode', failing)
  results = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 30)
  assert all('device on fire' in str(result) for result in results)
  monkeypatch.undo()
  same(await engine.generate('a', prompt(0, 5), LONG), free)


async def test_weights_that_are_no_numbers_fail_the_request(engine):
  broken = jax.tree.map(lambda x: x * np.nan, weights_of(0))
  await engine.load(3, broken)
  with pytest.raises(FloatingPointError, match=r"'a': .* token 0, weights version 3"):
    await engine.generate('a', prompt(0, 5), LONG)


async def test_nothing_runs_when_there_is_nothing_to_do(engine):
  await engine.generate('a', prompt(0, 5), LONG)
  await until(lambda: engine._task.done())
  assert engine._in_flight is None


async def test_the_event_loop_is_not_held(engine):
  """While the device thread is stuck, the loop goes on."""
  gate = threading.Event()
  stuck = asyncio.create_task(engine._device_thread.run(gate.wait))
  job = asyncio.create_task(engine.generate('a', prompt(0, 5), LONG))
  for _ in range(20):
    await asyncio.sleep(0.001)
  assert not job.done()
  gate.set()
  await stuck
  assert (await job).finish_reason == 'length'


@pytest.mark.slow
async def test_weights_that_compile_after_warmup_are_told_of(caplog):
  device_thread = DeviceThread()
  engine = JaxEngine(
    MODEL,
    device_thread=device_thread,
    max_num_seqs=2,
    max_length=16,
    prompt_buckets=[16],
  )
  await engine.load(0, weights_of(0))
  await engine.warmup()
  await engine.load(1, weights_of(1))
  await engine.generate('a', prompt(0, 5), SamplingParams(max_tokens=2))
  await engine.load(2, weights_of(2))
  assert 'after warm-up' not in caplog.text
  await engine.load(3, jax.tree.map(lambda x: x.astype('bfloat16'), weights_of(0)))
  await engine.generate('b', prompt(0, 5), SamplingParams(max_tokens=2))
  await engine.load(4, weights_of(0))
  assert 'after warm-up, for version' in caplog.text
  assert 'another dtype, shape or layout' in caplog.text
  device_thread.close()


async def test_nothing_compiles_after_warmup():
  device_thread = DeviceThread()
  engine = JaxEngine(
    MODEL,
    device_thread=device_thread,
    max_num_seqs=3,
    max_length=48,
    prompt_buckets=[16, 48],
  )
  await engine.load(0, weights_of(0))
  await engine.warmup()
  count = engine.compile_count
  assert count == 2 + 3
  events = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda name, *_, **__: events.append(name) if 'backend_compile' in name else None
  )
  try:
    for i in range(12):
      rules = SamplingParams(
        max_tokens=1 + i,
        temperature=[0.0, 0.5, 1.0][i % 3],
        top_p=[1.0, 0.9][i % 2],
        top_k=i % 4,
        stop_token_ids=tuple(range(i % 3)),
        seed=i,
      )
      jobs = [
        engine.generate(f'{j}', prompt(i + j // 2, 1 + 3 * i), rules)
        for j in range(1 + i % 5)
      ]
      await asyncio.gather(*jobs)
      await engine.load(i + 1, weights_of(i % 3))
  finally:
    jax.monitoring.clear_event_listeners()
  assert engine.compile_count == count
  assert not events
  device_thread.close()


async def test_drained_it_ends_what_runs_and_keeps_the_line(engine):
  """Five requests on two slots: none deadlocks, and no sequence has two versions."""
  free = [await engine.generate(f'free{i}', prompt(i, 5), LONG) for i in (0, 1)]
  jobs = [
    asyncio.create_task(engine.generate(f'{i}', prompt(i % 2, 5), LONG))
    for i in range(5)
  ]
  await until(started(engine, '0', 4))
  await asyncio.wait_for(engine.drain(), 30)
  assert [job.done() for job in jobs] == [True, True, False, False, False]
  await asyncio.sleep(0.02)
  assert not engine._scheduler.num_busy and not jobs[2].done()
  await engine.load(1, weights_of(1))
  await engine.resume()
  done = await asyncio.wait_for(asyncio.gather(*jobs), 30)
  same(done[0], free[0])
  same(done[1], free[1])
  assert [set(one.weights_versions.tolist()) for one in done] == [
    {0},
    {0},
    {1},
    {1},
    {1},
  ]


async def test_asleep_it_has_no_cache_and_awake_it_goes_on(engine):
  free = [await engine.generate(f'free{i}', prompt(i, 5), LONG) for i in (0, 1)]
  jobs = [
    asyncio.create_task(engine.generate(f'{i}', prompt(i % 2, 5), LONG))
    for i in range(3)
  ]
  await until(started(engine, '0', 4))
  assert engine._state is not None
  await asyncio.wait_for(engine.sleep(), 30)
  assert engine._state is None and [job.done() for job in jobs] == [True, True, False]
  await engine.resume()
  same((await asyncio.wait_for(jobs[2], 30)), free[0])
  assert engine._state is not None


async def test_nothing_to_drain_is_drained_at_once(engine):
  await asyncio.wait_for(engine.drain(), 5)
  job = asyncio.create_task(engine.generate('a', prompt(0, 5), LONG))
  await asyncio.sleep(0.02)
  assert not job.done()
  await engine.resume()
  assert len((await job).tokens) == 50


@pytest.mark.parametrize('cut', [False, True])
async def test_copied_weights_survive_the_donation_of_their_source(engine, cut):
  expected = await engine.generate('before', prompt(0, 5), LONG)
  source = jax.tree.map(jax.numpy.array, weights_of(0))
  if cut:
    source = layer_stack.unstack(MODEL.config, source)
  await engine.load(1, source, copy=True)
  for x in jax.tree.leaves(source):
    x.delete()
  done = await engine.generate('after', prompt(0, 5), LONG)
  np.testing.assert_array_equal(done.tokens, expected.tokens)
  np.testing.assert_array_equal(done.logprobs, expected.logprobs)
  assert set(done.weights_versions) == {1}


async def test_requests_that_come_while_idle_engines_load_get_the_new_weights(engine):
  expected = await load_and_generate(engine, 1)
  await engine.load(0, weights_of(0))
  gate = threading.Event()
  held = engine._device_thread.run(gate.wait, 20)  # so that loading takes a while
  loading = asyncio.create_task(engine.load(1, weights_of(1)))
  await asyncio.sleep(0)
  assert engine.version == 0
  job = asyncio.create_task(engine.generate('meanwhile', prompt(0, 5), LONG))
  await asyncio.sleep(0.01)
  gate.set()
  done, *_ = await asyncio.gather(job, loading, held)
  same(done, expected)
  assert set(done.weights_versions) == {1}


async def load_and_generate(engine, number):
  await engine.load(number, weights_of(number))
  return await engine.generate('expected', prompt(0, 5), LONG)


async def test_requests_do_not_wait_for_weights_that_cannot_be_loaded(engine):
  gate = threading.Event()
  held = engine._device_thread.run(gate.wait, 20)
  loading = asyncio.create_task(engine.load(1, None))
  await asyncio.sleep(0)
  job = asyncio.create_task(engine.generate('meanwhile', prompt(0, 5), LONG))
  await asyncio.sleep(0.01)
  gate.set()
  done = await asyncio.wait_for(
    asyncio.gather(job, loading, held, return_exceptions=True), 20
  )
  assert 'no weights' in str(done[0]) and isinstance(done[1], TypeError), done
