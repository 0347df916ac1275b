"""A real vLLM on CPU, next to the learner's model and to `JaxEngine`."""

import asyncio
import dataclasses

import numpy as np
import pytest
import pytest_asyncio

from jaxrl.device_thread import DeviceThread
from jaxrl.rollout.engine.jax_engine import JaxEngine
from jaxrl.types import SamplingParams
from tests.rollout.vllm.needs import VLLM

pytestmark = [*VLLM, pytest.mark.asyncio(loop_scope='session')]

PROMPTS = [[7, 8, 9, 10 + i] for i in range(12)]


async def complete(engine, name, prompts, **rules):
  """The completions of several prompts at once, each with a seed of its own."""
  rules = {'max_tokens': 40, **rules}
  seeds = rules.pop('seeds', range(len(prompts)))
  return await asyncio.gather(
    *(
      engine.generate(f'{name}/{i}', prompt, SamplingParams(seed=seed, **rules))
      for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
    )
  )


@pytest_asyncio.fixture(loop_scope='session')
async def jax_engine(world):
  device_thread = DeviceThread()
  engine = JaxEngine(
    world.model,
    world.tokenizer,
    device_thread=device_thread,
    max_num_seqs=8,
    max_length=256,
  )
  await engine.load(0, world.old)
  yield engine
  device_thread.close()


def ascii_pair(tokenizer, tokens):
  """Two neighbours that spell plain text, and their place."""
  for at in range(4, len(tokens) - 4):
    text, before = (tokenizer.decode(tokens[at : at + n]) for n in (2, 1))
    if text.isascii() and len(text) > len(before) > 0:
      return at, text
  raise AssertionError(f'no plain text in {tokens}')


async def until(engine, name, count):
  """Waits until a request has emitted so many tokens."""
  while True:
    progress = (await engine.progress([name])).get(name)
    if progress is not None and len(progress.tokens) >= count:
      return progress
    await asyncio.sleep(0.002)


async def test_log_probs_are_the_learners(world):
  """Over 2,000 tokens and more, at temperature 1 and another one."""
  await world.engine.load(world.next(), world.old)
  gaps = []
  for temperature in (1.0, 0.7):
    prompts = [[3 + i, 50 + i, 100 + i] for i in range(16)]
    completions = await complete(
      world.engine, 'mismatch', prompts, temperature=temperature, max_tokens=80
    )
    for prompt, completion in zip(prompts, completions, strict=True):
      assert len(completion.tokens) == 80
      learners = world.rescore(world.old, prompt, completion.tokens, temperature)
      gaps.append(np.abs(learners - completion.logprobs))
  gaps = np.concatenate(gaps)
  print(f'mismatch of {gaps.size} tokens: mean {gaps.mean():.2e}, max {gaps.max():.2e}')
  assert gaps.size >= 2000
  assert gaps.mean() <= 1e-6 and gaps.max() <= 1e-4


async def test_greedy_completions_are_those_of_the_jax_engine(world, jax_engine):
  await world.engine.load(world.next(), world.old)
  rules = {'temperature': 0.0, 'top_p': 0.5, 'top_k': 2, 'max_tokens': 24}
  ours = await complete(world.engine, 'greedy', PROMPTS[:4], **rules)
  theirs = await complete(jax_engine, 'greedy', PROMPTS[:4], **rules)
  for vllm, jax in zip(ours, theirs, strict=True):
    np.testing.assert_array_equal(vllm.tokens, jax.tokens)
    np.testing.assert_allclose(vllm.logprobs, jax.logprobs, atol=1e-4)
    assert vllm.finish_reason == jax.finish_reason == 'length'
    for field in dataclasses.fields(vllm):
      one, other = getattr(vllm, field.name), getattr(jax, field.name)
      assert getattr(one, 'dtype', None) == getattr(other, 'dtype', None)


async def test_stops_where_the_jax_engine_stops(world, jax_engine):
  """The stop's tokens are kept, a string that spans a cut is found, ids win at once."""
  await world.engine.load(world.next(), world.old)
  (plain,) = await complete(
    world.engine, 'plain', PROMPTS[:1], temperature=0.0, max_tokens=24
  )
  tokens = plain.tokens.tolist()
  at, text = ascii_pair(world.tokenizer, tokens)
  cases = [
    {'stop': (text,)},
    {'stop': (text, 'never there'), 'stop_token_ids': (tokens[at + 3],)},
    {'stop_token_ids': (tokens[2], tokens[20])},
  ]
  for number, case in enumerate(cases):
    rules = {'temperature': 0.0, 'max_tokens': 24, **case}
    (ours,) = await complete(world.engine, f'stop{number}', PROMPTS[:1], **rules)
    (theirs,) = await complete(jax_engine, f'stop{number}', PROMPTS[:1], **rules)
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    assert ours.finish_reason == theirs.finish_reason == 'stop'
    assert len(ours.tokens) < 24
    assert len(ours.tokens) == len(ours.logprobs) == len(ours.weights_versions)
  (part,) = await complete(
    world.engine,
    'first',
    [[*PROMPTS[0], *tokens[: at + 1]]],
    temperature=0.0,
    max_tokens=16,
    stop=(text,),
    num_generated=at + 1,
  )
  assert part.finish_reason == 'stop' and part.tokens.tolist() == [tokens[at + 1]]


async def test_a_seed_draws_the_same_alone_and_in_company(world):
  await world.engine.load(world.next(), world.old)
  together = await complete(world.engine, 'together', PROMPTS)
  for i in (0, 5):
    (alone,) = await complete(world.engine, f'alone{i}', PROMPTS[i : i + 1], seeds=[i])
    np.testing.assert_array_equal(alone.tokens, together[i].tokens)
  same = await complete(world.engine, 'same', [PROMPTS[0]] * 3, seeds=[0, 0, 2**64 - 1])
  np.testing.assert_array_equal(same[0].tokens, same[1].tokens)
  assert not np.array_equal(same[0].tokens, same[2].tokens)


async def test_truncated_log_probs_are_of_what_was_left(world):
  """Top-k of 2: the two probabilities that remain add up to one."""
  await world.engine.load(world.next(), world.old)
  prompt = PROMPTS[3]
  completions = await complete(
    world.engine, 'topk', [prompt] * 12, max_tokens=1, top_k=2, temperature=1.0
  )
  seen = {int(c.tokens[0]): float(np.exp(c.logprobs[0])) for c in completions}
  assert len(seen) <= 2
  if len(seen) == 2:
    assert sum(seen.values()) == pytest.approx(1, abs=1e-5)
  else:
    assert next(iter(seen.values())) > 0.5


async def test_an_update_in_flight_gives_two_versions_at_the_right_token(world):
  engine = world.engine
  first, second = world.next(), world.next()
  await engine.load(first, world.old)
  prompts = PROMPTS[:4]
  task = asyncio.create_task(complete(engine, 'flight', prompts, max_tokens=160))
  await until(engine, 'flight/0', 20)
  await engine.load(second, world.new)
  assert engine.version == second
  for prompt, output in zip(prompts, await task, strict=True):
    assert len(output.tokens) == 160 and output.finish_reason == 'length'
    cut = int(np.sum(output.weights_versions == first))
    assert 10 <= cut < 160
    assert output.weights_versions.tolist() == [first] * cut + [second] * (160 - cut)
    old = np.abs(world.rescore(world.old, prompt, output.tokens) - output.logprobs)
    new = np.abs(world.rescore(world.new, prompt, output.tokens) - output.logprobs)
    # Each token is of the version that it names, and not of the other.
    assert old[:cut].max() < 1e-4 and new[cut:].max() < 1e-4
    assert new[:cut].mean() > 0.1 and old[cut:].mean() > 0.1


async def test_no_cached_prefix_outlives_its_weights(world):
  engine = world.engine
  prompt = [20 + i % 200 for i in range(200)]
  await engine.load(world.next(), world.old)
  await complete(engine, 'fill', [prompt], max_tokens=2)
  engine.metrics()
  await complete(engine, 'hit', [[*prompt, 5]], max_tokens=2)
  assert engine.metrics()['tokens/prompt_reused'] >= 128
  await engine.load(world.next(), world.new)
  (completion,) = await complete(engine, 'fresh', [[*prompt, 5]], max_tokens=8)
  assert engine.metrics()['tokens/prompt_reused'] == 0
  learners = world.rescore(world.new, [*prompt, 5], completion.tokens)
  np.testing.assert_allclose(completion.logprobs, learners, atol=1e-4)


async def test_an_abort_returns_what_was_emitted(world):
  engine = world.engine
  version = world.next()
  await engine.load(version, world.old)
  rules = SamplingParams(max_tokens=200, seed=3)
  task = asyncio.create_task(engine.generate('abort/0', PROMPTS[0], rules))
  before = await until(engine, 'abort/0', 5)
  await engine.abort('abort/0')
  assert await engine.progress(['abort/0', 'unknown']) == {}
  completion = await task
  count = len(before.tokens)
  assert completion.finish_reason == 'abort' and count <= len(completion.tokens) < 200
  np.testing.assert_array_equal(completion.tokens[:count], before.tokens)
  np.testing.assert_array_equal(completion.logprobs[:count], before.logprobs)
  assert set(completion.weights_versions) == {version}
  await engine.abort('unknown')
  waiter = asyncio.create_task(engine.generate('abort/1', PROMPTS[0], rules))
  await asyncio.sleep(0)
  await engine.abort('abort/1')  # before vLLM has heard of it
  assert (await waiter).finish_reason == 'abort'
  waiter = asyncio.create_task(engine.generate('abort/2', PROMPTS[0], rules))
  await until(engine, 'abort/2', 2)
  waiter.cancel()  # the only one who waited
  with pytest.raises(asyncio.CancelledError):
    await waiter
  assert await engine.progress(['abort/2']) == {}


async def test_a_pause_keeps_requests_and_a_resume_ends_them(world):
  engine = world.engine
  await engine.load(world.next(), world.old)
  (whole,) = await complete(engine, 'whole', PROMPTS[:1], max_tokens=120)
  task = asyncio.create_task(complete(engine, 'paused', PROMPTS[:1], max_tokens=120))
  await until(engine, 'paused/0', 10)
  await engine.pause()
  one = (await engine.progress(['paused/0']))['paused/0']
  await asyncio.sleep(0.2)
  other = (await engine.progress(['paused/0']))['paused/0']
  assert (
    len(one.tokens) == len(other.tokens) < 120 and engine.seconds_since_progress == 0
  )
  await engine.load(world.next(), world.old)  # a swap does not end a pause
  await asyncio.sleep(0.1)
  assert len((await engine.progress(['paused/0']))['paused/0'].tokens) < 120
  await engine.resume()
  (completion,) = await task
  np.testing.assert_array_equal(completion.tokens, whole.tokens)
  assert len(set(completion.weights_versions)) == 2


async def test_a_drain_ends_what_runs_and_holds_what_comes(world):
  engine = world.engine
  await engine.load(world.next(), world.old)
  running = asyncio.create_task(complete(engine, 'running', PROMPTS[:2], max_tokens=60))
  await until(engine, 'running/1', 2)
  await engine.drain()
  assert all(c.finish_reason == 'length' for c in await running)
  later = asyncio.create_task(complete(engine, 'later', PROMPTS[:1], max_tokens=4))
  await asyncio.sleep(0.2)
  assert not later.done()
  await engine.resume()
  assert len((await later)[0].tokens) == 4


async def test_one_id_is_one_request(world):
  engine = world.engine
  await engine.load(world.next(), world.old)
  rules = SamplingParams(max_tokens=30, seed=1)
  one, other = await asyncio.gather(
    engine.generate('same', PROMPTS[0], rules),
    engine.generate('same', PROMPTS[0], rules),
  )
  assert one is other
  task = asyncio.create_task(engine.generate('same', PROMPTS[0], rules))
  await asyncio.sleep(0)
  with pytest.raises(ValueError, match='another prompt'):
    await engine.generate('same', PROMPTS[1], rules)
  await task


@pytest.mark.parametrize(
  'prompt, rules, message',
  [
    ([], {}, 'row of token ids'),
    ([1] * 256, {}, 'leaves no room in a window of 256'),
    ([320], {}, 'outside 0 … 319'),
    ([1], {'max_tokens': 0}, 'at least 1'),
    ([1], {'temperature': 0.001}, 'at least 0.01'),
    ([1], {'top_p': 0.0}, 'top_p'),
    ([1], {'stop': ('',)}, 'empty stop string'),
    ([1], {'num_generated': 1}, 'num_generated=1'),
  ],
)
async def test_requests_that_cannot_be_served_are_refused(
  world, prompt, rules, message
):
  await world.engine.load(world.next(), world.old)
  with pytest.raises(ValueError, match=message):
    await world.engine.generate(
      'r', prompt, SamplingParams(**{'max_tokens': 4} | rules)
    )


async def test_the_window_ends_a_completion(world):
  await world.engine.load(world.next(), world.old)
  (completion,) = await complete(world.engine, 'window', [[5] * 250], max_tokens=50)
  assert len(completion.tokens) == 6 and completion.finish_reason == 'length'


async def test_metrics_bear_the_names_of_the_jax_engine(world, jax_engine):
  engine = world.engine
  await engine.load(world.next(), world.old)
  await engine.warmup()
  assert set(engine.metrics()) == set(jax_engine.metrics())
  completions = await complete(engine, 'metrics', PROMPTS[:4], max_tokens=10)
  report = engine.metrics()
  assert report['tokens/generated'] == sum(len(c.tokens) for c in completions) == 40
  assert report['tokens/prefilled'] + report['tokens/prompt_reused'] == 16
  assert report['rollout/decode_steps'] >= 10
  assert 0 < report['rollout/busy_slots'] <= 1
  assert report['tokens/per_second'] > 0 and report['time/decode'] > 0
  assert engine.metrics()['tokens/generated'] == 0
