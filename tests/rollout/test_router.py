"""Where requests go, and what becomes of them when an engine is lost."""

import asyncio

import numpy as np
import pytest

from jaxrl.rollout.engine import router
from jaxrl.rollout.engine.actor_proxy import EngineDeadError
from jaxrl.rollout.engine.router import EngineRouter
from jaxrl.types import Completion, SamplingParams
from tests.models.images import Picture


class Scripted:
  """Emits token `100 · seed + place`, one at each `step`; dies when told to."""

  def __init__(self, version=0):
    self.version, self.paused = version, False
    self.requests, self.calls, self.aborted = {}, [], []
    self.fault = None

  async def generate(self, name, prompt, sampling):
    self.calls.append((name, list(prompt), sampling))
    if self.fault is not None:
      raise self.fault
    future = asyncio.get_running_loop().create_future()
    self.requests[name] = sampling, [], [], future
    return await future

  def step(self):
    for name, (sampling, tokens, versions, future) in list(self.requests.items()):
      tokens.append(100 * sampling.seed + sampling.num_generated + len(tokens))
      versions.append(self.version)
      if len(tokens) == sampling.max_tokens:
        del self.requests[name]
        future.set_result(self.completion(tokens, versions, 'length'))

  @staticmethod
  def completion(tokens, versions, reason='abort'):
    tokens = np.array(tokens, np.int32)
    return Completion(tokens, -tokens / 7, np.array(versions, np.int32), reason)

  async def progress(self, names):
    if self.fault is not None:
      raise self.fault
    mine = {name: self.requests[name] for name in names if name in self.requests}
    return {name: self.completion(r[1], r[2]) for name, r in mine.items()}

  async def abort(self, name):
    self.aborted.append(name)
    if name in self.requests:
      _, tokens, versions, future = self.requests.pop(name)
      future.set_result(self.completion(tokens, versions))

  async def pause(self):
    self.paused = True

  async def resume(self):
    self.paused = False

  drain = pause

  async def metrics(self):
    if self.fault is not None:
      raise self.fault
    return {'tokens/generated': 10.0, 'time/decode': 2.0}

  def die(self, error=None):
    self.fault = error or EngineDeadError('killed')
    for *_, future in self.requests.values():
      if not future.done():
        future.set_exception(self.fault)
    self.requests.clear()


async def settled():
  for _ in range(10):
    await asyncio.sleep(0)


def begin(engine_router, name, seed=1, max_tokens=4, prompt=(7, 8)):
  rules = SamplingParams(max_tokens, seed=seed)
  return asyncio.create_task(engine_router.generate(name, list(prompt), rules))


def loads(engines):
  return [len(engine.requests) for engine in engines]


async def end(engines, jobs):
  while not all(job.done() for job in jobs):
    for engine in engines:
      engine.step()
    await settled()
  return [job.result() for job in jobs]


async def test_groups_go_to_the_least_loaded_and_stay_together():
  engines = [Scripted() for _ in range(3)]
  engine_router = EngineRouter(engines, affinity_slack=4)
  jobs = [
    begin(engine_router, f'math/{group}/0/{member}')
    for group in range(6)
    for member in range(4)
  ]
  await settled()
  assert loads(engines) == [8, 8, 8]
  for engine in engines:
    assert len({name.split('/')[1] for name in engine.requests}) == 2
  await end(engines, jobs)
  # Later turns of a group: where its prefix is, though all are idle now.
  for group in range(6):
    (home,) = [e for e in engines if any(f'math/{group}/' in n for n, *_ in e.calls)]
    job = begin(engine_router, f'math/{group}/0/0/1')
    await settled()
    assert loads([home]) == [1]
    await end(engines, [job])


async def test_a_group_leaves_an_engine_that_is_clearly_busier():
  engines = [Scripted(), Scripted()]
  engine_router = EngineRouter(engines, affinity_slack=3)
  jobs = [begin(engine_router, f'math/0/0/{member}') for member in range(8)]
  await settled()
  # Four more than the other is one too many; then the other is the group's.
  assert [name for name, *_ in engines[1].calls] == [
    f'math/0/0/{m}' for m in (4, *range(5, 8))
  ]
  assert loads(engines) == [4, 4]
  await end(engines, jobs)


async def test_a_request_goes_on_elsewhere_from_what_was_emitted():
  first, second = Scripted(version=4), Scripted(version=5)
  engine_router = EngineRouter([first, second], poll_interval=0.01)
  job = begin(engine_router, 'math/0/0/0', seed=3, max_tokens=5)
  await settled()
  first.step()
  first.step()
  await asyncio.sleep(0.05)  # the router asks
  first.step()  # and never hears of this one
  first.die()
  await settled()
  ((name, prompt, sampling),) = second.calls
  assert (name, prompt) == ('math/0/0/0', [7, 8, 300, 301])
  assert (sampling.num_generated, sampling.max_tokens, sampling.seed) == (2, 3, 3)
  (done,) = await end([second], [job])
  assert done.tokens.tolist() == [300, 301, 302, 303, 304]
  assert done.weights_versions.tolist() == [4, 4, 5, 5, 5]
  np.testing.assert_array_equal(done.logprobs, -done.tokens / 7)
  assert done.finish_reason == 'length'
  figures = await engine_router.metrics()
  assert figures['rollout/requests_moved'] == 1
  assert figures['rollout/tokens_kept'] == 2
  assert figures['tokens/generated'] == 10  # of the one that lives
  assert 'rollout/requests_moved' not in await engine_router.metrics()


async def test_it_survives_several_engines_one_after_another():
  engines = [Scripted(version=i) for i in range(4)]
  engine_router = EngineRouter(engines, poll_interval=0.01)
  job = begin(engine_router, 'math/0/0/0', max_tokens=9)
  for dying in engines[:3]:
    await settled()
    dying.step()
    dying.step()
    await asyncio.sleep(0.05)
    dying.die()
  await settled()
  (done,) = await end(engines[3:], [job])
  assert done.tokens.tolist() == list(range(100, 109))
  assert done.weights_versions.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 3]


async def test_without_any_engine_requests_wait_for_a_new_one():
  engines = [Scripted(), Scripted()]
  engine_router = EngineRouter(engines, poll_interval=0.01)
  jobs = [begin(engine_router, f'math/{i}/0/0', seed=i) for i in range(3)]
  await settled()
  for engine in engines:
    engine.step()
  await asyncio.sleep(0.05)
  for engine in engines:
    engine.die()
  await asyncio.sleep(0.02)
  assert not any(job.done() for job in jobs)
  fresh = Scripted(version=9)
  await engine_router.replace(1, fresh)
  await settled()
  assert loads([fresh]) == [3]
  results = await end([fresh], jobs)
  for seed, done in enumerate(results):
    assert done.tokens.tolist() == [100 * seed + t for t in range(4)]
    assert done.weights_versions.tolist() == [0, 9, 9, 9]


async def test_a_lost_engine_gets_nothing_until_it_is_replaced(monkeypatch):
  engines = [Scripted(), Scripted()]
  engine_router = EngineRouter(engines)
  engines[0].die()
  jobs = [begin(engine_router, f'math/{i}/0/0') for i in range(6)]
  await settled()
  assert len(engines[0].calls) < 6 and loads(engines) == [0, 6]
  num_requests = len(engines[0].calls)
  jobs += [begin(engine_router, f'math/{i}/0/0') for i in range(6, 12)]
  await settled()
  assert len(engines[0].calls) == num_requests
  fresh = Scripted()
  await engine_router.replace(0, fresh)
  assert (await engine_router.metrics())['rollout/engines_replaced'] == 1
  jobs += [begin(engine_router, f'math/{i}/0/0') for i in range(12, 16)]
  await settled()
  assert loads([fresh]) == [4]
  await end([fresh, engines[1]], jobs)


async def test_it_gives_up_in_the_end_and_says_why(monkeypatch):
  monkeypatch.setattr(router, 'COOLDOWN_S', 0.005)
  engines = [Scripted(), Scripted()]
  engine_router = EngineRouter(engines, no_engine_timeout=0.05)
  for engine in engines:
    engine.die(EngineDeadError('no route to it'))
  with pytest.raises(RuntimeError, match=r'math/0/0/0.* failed .*no route to it'):
    await begin(engine_router, 'math/0/0/0')
  engine_router = EngineRouter(engines, max_retries=2)
  for engine in engines:
    engine.die(OSError('device on fire'))
    engine.calls.clear()
  with pytest.raises(RuntimeError, match=r'failed 3 times.*on fire') as error:
    await begin(engine_router, 'math/0/0/0')
  assert isinstance(error.value.__cause__, OSError)
  assert sum(len(engine.calls) for engine in engines) == 3


@pytest.mark.parametrize('error', [ValueError('too long'), FloatingPointError('nan')])
async def test_what_no_engine_can_serve_is_told_at_once(error):
  engines = [Scripted(), Scripted()]
  engines[0].fault = error
  with pytest.raises(type(error), match=str(error)):
    await begin(EngineRouter(engines), 'math/0/0/0')
  assert not engines[1].calls


async def test_one_id_is_one_request():
  engines = [Scripted(), Scripted()]
  engine_router = EngineRouter(engines)
  jobs = [begin(engine_router, 'math/0/0/0') for _ in range(2)]
  await settled()
  assert loads(engines) == [1, 0]
  with pytest.raises(ValueError, match='served with another prompt'):
    await begin(engine_router, 'math/0/0/0', seed=2)
  jobs[0].cancel()
  await settled()
  (done,) = await end(engines, jobs[1:])
  assert len(done.tokens) == 4 and not engines[0].aborted


async def test_whoever_is_not_waited_for_is_aborted():
  engine = Scripted()
  engine_router = EngineRouter([engine])
  job = begin(engine_router, 'math/0/0/0')
  await settled()
  job.cancel()
  await settled()
  assert engine.aborted == ['math/0/0/0'] and not engine.requests
  again = begin(engine_router, 'math/0/0/0')
  await settled()
  await end([engine], [again])


async def test_an_abort_keeps_what_was_emitted_with_or_without_an_engine():
  engine = Scripted()
  engine_router = EngineRouter([engine], poll_interval=0.01)
  jobs = [begin(engine_router, f'math/0/0/{i}') for i in range(2)]
  await settled()
  engine.step()
  await engine_router.abort('math/0/0/0')
  await engine_router.abort('unknown')
  served = await jobs[0]
  assert served.tokens.tolist() == [100] and served.finish_reason == 'abort'
  await asyncio.sleep(0.05)
  engine.die()
  await settled()
  assert not jobs[1].done()
  assert (await engine_router.progress(['math/0/0/1']))[
    'math/0/0/1'
  ].tokens.tolist() == [100]
  await engine_router.abort('math/0/0/1')
  stranded = await asyncio.wait_for(jobs[1], 1)
  assert stranded.tokens.tolist() == [100] and stranded.finish_reason == 'abort'
  early = begin(engine_router, 'math/0/0/2')
  await asyncio.sleep(0)
  await engine_router.abort('math/0/0/2')
  assert len((await early).tokens) == 0


async def test_all_engines_pause_and_a_new_one_with_them():
  engines = [Scripted(), Scripted()]
  engine_router = EngineRouter(engines)
  await engine_router.pause()
  assert all(engine.paused for engine in engines)
  fresh = Scripted()
  await engine_router.replace(0, fresh)
  assert fresh.paused
  await engine_router.resume()
  assert not fresh.paused and not engines[1].paused
  await engine_router.drain()
  assert fresh.paused and engines[1].paused


async def test_an_old_answer_is_not_taken_for_a_new_one():
  """An engine asked before it was lost, and heard after, speaks of another attempt."""
  slow, other = Scripted(), Scripted()
  engine_router = EngineRouter([slow, other], poll_interval=0.01)
  gate, answers = asyncio.Event(), slow.progress

  async def late(names):
    progress = await answers(names)
    await gate.wait()
    return progress

  slow.progress = late
  job = begin(engine_router, 'math/0/0/0')
  await settled()
  slow.step()
  await asyncio.sleep(0.05)
  for *_, future in slow.requests.values():
    future.set_exception(EngineDeadError('killed'))
  await settled()
  gate.set()
  await settled()
  assert (await engine_router.progress(['math/0/0/0']))[
    'math/0/0/0'
  ].tokens.tolist() == []
  (done,) = await end([other], [job])
  assert done.tokens.tolist() == [100, 101, 102, 103]


def test_a_router_needs_an_engine():
  with pytest.raises(ValueError, match='at least one engine'):
    EngineRouter([])


async def test_images_go_with_their_request_to_every_engine():
  class Seeing(Scripted):
    async def generate(self, name, prompt, sampling, images=()):
      self.seen = [image.digest for image in images]
      return await super().generate(name, prompt, sampling)

  picture, engines = Picture(9, 9), [Seeing(), Seeing()]
  engine_router = EngineRouter(engines)
  args = 'math/0/0/0', [7, 8], SamplingParams(max_tokens=4)
  job = asyncio.create_task(engine_router.generate(*args, [picture]))
  await settled()
  with pytest.raises(ValueError, match='is being served with another prompt'):
    await engine_router.generate(*args, [Picture(9, 9, seed=1)])
  (lost,) = [engine for engine in engines if engine.requests]
  lost.die()
  await settled()
  await end([engine for engine in engines if engine is not lost], [job])
  assert [engine.seen for engine in engines] == [[picture.digest]] * 2
