"""An engine whose requests each name their adapters."""

import asyncio

import jax
import numpy as np
import pytest

from jaxrl import model_loading
from jaxrl.device_thread import DeviceThread
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.tinker import row_adapters
from jaxrl.rollout.tinker.tenant_engine import BASE, TenantEngine, TenantSampling
from tests.tinker import tiny

CONFIG = model_loading.random_config(**tiny.SIZES)
MODEL = TransformerLM(CONFIG)
PARAMS = MODEL.init(jax.random.key(0))
PROMPT = np.arange(5)
SCALE = 2.0


def adapters(seed, rank):
  rng = np.random.default_rng(seed)
  layers = frozenset(row_adapters.layer_sizes(CONFIG))
  fresh = row_adapters.init_adapters(CONFIG, rank, seed, layers)
  return {
    name: (a, rng.normal(0, 0.5, b.shape).astype(np.float32))
    for name, (a, b) in fresh.items()
  }


OWN = {'a': adapters(1, 4), 'b': adapters(2, 8), 'c': adapters(3, 2)}


class Bench:
  """One engine, loaded, and what has been loaded beside it."""

  def __init__(self):
    self.thread = DeviceThread()
    self.loads: list[str] = []
    self.engine = TenantEngine(
      MODEL,
      None,
      device_thread=self.thread,
      max_adapters=2,
      max_rank=8,
      max_length=32,
      max_num_seqs=4,
      decode_steps=4,
    )

  async def draw(self, name, number, **options):
    async def load():
      self.loads.append(name)
      return OWN[name], SCALE

    params = {'max_tokens': 6, 'seed': 1, **options}
    async with self.engine.adapters(name, load):
      done = await self.engine.generate(
        f'{name}{number}', PROMPT, TenantSampling(adapters=name, **params)
      )
      whole = np.concatenate([PROMPT, done.tokens])
      row = whole[:-1].astype(np.int32), whole[1:, None].astype(np.int32)
      scores = await self.engine.score([row], name, top_k=2)
    return done, scores[0]


@pytest.fixture(scope='module')
def bench():
  made = Bench()
  yield made
  made.thread.close()


def test_requests_of_several_tenants_draw_what_each_draws_alone(bench):
  async def run():
    await bench.engine.load(0, PARAMS)
    alone = [await bench.draw(name, 'alone') for name in (BASE, 'a', 'b')]
    together = await asyncio.gather(
      bench.draw('b', 0),
      bench.draw('a', 1, seed=9),
      bench.draw(BASE, 2),
      bench.draw('a', 3),
      bench.draw('b', 4, seed=7),
    )
    return alone, together

  alone, together = asyncio.run(run())
  for (one, _), i in zip(alone, (2, 3, 0), strict=True):
    np.testing.assert_array_equal(one.tokens, together[i][0].tokens)
    np.testing.assert_array_equal(one.logprobs, together[i][0].logprobs)
  for done, (own, ids, best, *_) in together:
    start = len(PROMPT) - 1
    np.testing.assert_allclose(own[start:, 0], done.logprobs, atol=1e-4)
    assert ids.shape == (len(PROMPT) + 5, 2) and (best[:, 0] >= best[:, 1]).all()
  assert sorted(bench.loads) == ['a', 'b']  # each once


def test_adapters_that_none_uses_make_room(bench):
  async def run():
    await bench.engine.load(0, PARAMS)
    bench.loads.clear()
    first, _ = await bench.draw('a', 'x')
    # Three in two places: one waits until another is not in use.
    await asyncio.gather(*(bench.draw(name, 'y') for name in 'abc'))
    again, _ = await bench.draw('a', 'z')
    return first, again

  first, again = asyncio.run(run())
  np.testing.assert_array_equal(first.tokens, again.tokens)
  assert set(bench.loads) == {'a', 'b', 'c'}


def test_adapters_that_have_diverged_fail_their_own_requests_alone(bench):
  """Whatever slots they had: the others draw, bit for bit, what they draw alone."""
  # Finite, as all that can be saved, but with logits that are not.
  OWN['huge'] = jax.tree.map(lambda x: x * np.float32(1e20), OWN['a'])
  OWN['beyond'] = jax.tree.map(lambda x: x * np.float32(1e35), OWN['a'])

  async def run():
    await bench.engine.load(0, PARAMS)
    alone = [await bench.draw(name, 'alone') for name in ('a', BASE)]
    for i in range(3):
      one, base, huge = await asyncio.gather(
        bench.draw('a', f'beside {i}', max_tokens=6),
        bench.draw(BASE, f'beside {i}'),
        bench.draw('huge', i, max_tokens=20),
        return_exceptions=True,
      )
      assert isinstance(huge, ValueError) and 'have diverged' in str(huge)
      for (found, _), (expected, _) in zip((one, base), alone, strict=True):
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_array_equal(found.logprobs, expected.logprobs)
    # Given up in the middle; then all slots are used.
    given_up = [
      asyncio.create_task(bench.draw('huge', f'given up {i}', max_tokens=20))
      for i in range(4)
    ]
    await asyncio.sleep(0.05)
    for task in given_up:
      task.cancel()
    after = await asyncio.gather(*(bench.draw('a', f'after {i}') for i in range(8)))
    for found, _ in after:
      np.testing.assert_array_equal(found.logprobs, alone[0][0].logprobs)
    with pytest.raises(ValueError, match='weights of up to'):
      await bench.draw('beyond', 0)
    return await bench.draw(BASE, 'last'), alone[1]

  (last, _), (expected, _) = asyncio.run(run())
  np.testing.assert_array_equal(last.logprobs, expected.logprobs)


async def test_a_request_that_is_given_up_may_lose_its_adapters(bench):
  """They make room for others between a dispatch's choice and its start."""
  await bench.engine.load(0, PARAMS)
  expected, _ = await bench.draw('b', 'before')
  begun = asyncio.create_task(bench.draw('a', 'given up', max_tokens=20))
  dispatch = bench.engine._dispatch_decode

  def late(params, scheduled):
    bench.engine._places.places.pop('a', None)
    return dispatch(params, scheduled)

  bench.engine._dispatch_decode = late
  try:
    found, _ = await bench.draw('b', 'beside')
  finally:
    bench.engine._dispatch_decode = dispatch
    begun.cancel()
  np.testing.assert_array_equal(found.logprobs, expected.logprobs)
