"""A completion that was cut and taken up again is the one that was never cut."""

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxrl.device_thread import DeviceThread
from jaxrl.rollout.engine.jax_engine import JaxEngine
from jaxrl.rollout.engine.resumable_generation import concat_completions
from jaxrl.types import SamplingParams
from tests.rollout.test_jax_engine import MODEL, Letters, prompt, weights_of

NEW = 24


@pytest.fixture(scope='module')
def engines():
  """Two of other shapes: whoever takes a request up is not who began it."""
  device_threads = DeviceThread(), DeviceThread()
  shapes: list[dict[str, Any]] = [
    {'max_num_seqs': 4, 'decode_steps': 4},
    {'max_num_seqs': 3, 'decode_steps': 1},
  ]
  yield [
    JaxEngine(
      MODEL,
      Letters(),
      device_thread=device_thread,
      max_length=64,
      prompt_buckets=[64],
      prefill_tokens=64,
      **shape,
    )
    for device_thread, shape in zip(device_threads, shapes, strict=True)
  ]
  for device_thread in device_threads:
    device_thread.close()


async def resumed(engine, ids, whole, rules, cut):
  """`whole` from token `cut` on, as `engine` makes it; the part before is kept."""
  head = dataclasses.replace(
    whole,
    tokens=whole.tokens[:cut],
    logprobs=whole.logprobs[:cut],
    weights_versions=whole.weights_versions[:cut],
    finish_reason='abort',
  )
  rest = dataclasses.replace(
    rules, num_generated=cut, max_tokens=rules.max_tokens - cut
  )
  part = await engine.generate(f'{cut}', [*ids, *head.tokens.tolist()], rest)
  return concat_completions([head, part])


def close(one, two):
  """Prefill and decode add in other orders: the same tokens, log-probs to rounding."""
  np.testing.assert_array_equal(one.tokens, two.tokens)
  np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-5)
  np.testing.assert_array_equal(one.weights_versions, two.weights_versions)
  assert one.finish_reason == two.finish_reason


@pytest.mark.parametrize(
  'rules',
  [
    SamplingParams(NEW, seed=11),
    SamplingParams(NEW, seed=2**40 + 3, temperature=1.3, top_p=0.9, top_k=20),
    SamplingParams(NEW, temperature=0.0),
  ],
)
async def test_cut_anywhere_it_goes_on_elsewhere_as_it_would_have(engines, rules):
  one, two = engines
  ids = prompt(3, 7)
  await one.load(4, weights_of(0))
  await two.load(4, weights_of(0))
  whole = await one.generate('whole', ids, rules)
  cuts = range(1, len(whole.tokens))
  completions = await asyncio.gather(
    *(resumed(two, ids, whole, rules, c) for c in cuts)
  )
  for done in completions:
    close(done, whole)


@pytest.mark.parametrize('behind', [1, 2])
async def test_a_stop_string_across_the_cut_ends_it(engines, behind):
  one, two = engines
  ids = prompt(2, 6)
  await one.load(0, weights_of(0))
  await two.load(0, weights_of(0))
  free = await one.generate('free', ids, SamplingParams(NEW, seed=4))
  stop = Letters().decode(free.tokens[9:12], False)
  rules = SamplingParams(NEW, seed=4, stop=(stop,))
  whole = await one.generate('whole', ids, rules)
  assert whole.finish_reason == 'stop' and len(whole.tokens) == 12
  close(await resumed(two, ids, whole, rules, 12 - behind), whole)


async def test_the_prompt_s_own_text_is_no_part_of_a_stop_string(engines):
  one, _ = engines
  await one.load(0, weights_of(0))
  free = await one.generate('free', prompt(2, 6), SamplingParams(NEW, seed=4))
  across = Letters().decode([*prompt(2, 6)[-2:], free.tokens[0]], False)
  assert across not in Letters().decode(free.tokens, False)
  done = await one.generate(
    'a', prompt(2, 6), SamplingParams(NEW, seed=4, stop=(across,))
  )
  assert done.finish_reason == 'length'


async def test_progress_tells_what_was_emitted_so_far(engines):
  _, engine = engines
  await engine.load(0, weights_of(0))
  ids, rules = prompt(5, 4), SamplingParams(50, seed=1)
  whole = await engine.generate('whole', ids, rules)
  job = asyncio.create_task(engine.generate('a', ids, rules))
  seen = []
  while not job.done():
    seen += (await engine.progress(['a', 'unknown'])).values()
    await asyncio.sleep(0)
  counts = [len(part.tokens) for part in seen]
  assert counts == sorted(counts) and len(set(counts)) > 3
  for part in seen:
    count = len(part.tokens)
    assert part.finish_reason == 'abort'
    np.testing.assert_array_equal(part.tokens, whole.tokens[:count])
    np.testing.assert_array_equal(part.logprobs, whole.logprobs[:count])
    assert part.weights_versions.tolist() == [0] * count
  assert await engine.progress(['a']) == {}


@pytest.mark.parametrize('first', [-1, 4])
async def test_more_than_the_prompt_cannot_have_been_emitted(engines, first):
  with pytest.raises(ValueError, match=f'num_generated={first} must lie in 0 … 3'):
    await engines[0].generate('a', prompt(1, 4), SamplingParams(4, num_generated=first))


async def test_weights_come_in_while_the_line_is_full(engines):
  """More prompts than slots wait: `load` returns long before they have been served."""
  _, engine = engines
  await engine.load(0, weights_of(0))
  rules = SamplingParams(40, seed=1)
  jobs = [
    asyncio.create_task(engine.generate(f'{i}', prompt(i, 5), rules)) for i in range(12)
  ]
  while not any((await engine.progress(['0'])).values()):
    await asyncio.sleep(0)
  for version in (1, 2):
    await asyncio.wait_for(engine.load(version, weights_of(version)), 30)
    assert engine.version == version
    emitted = await engine.progress([f'{i}' for i in range(12)])
    assert sum(len(part.tokens) for part in emitted.values()) < 12 * 40 / 4
  assert not any(job.done() for job in jobs[3:])
  done = await asyncio.wait_for(asyncio.gather(*jobs), 60)
  assert all(len(one.tokens) == 40 for one in done)
  # What was in line came after the swap; of what was not, one dispatch at most.
  assert all(set(one.weights_versions) == {2} for one in done[3:])
