"""Decode as GPUs run it, of a known number of steps, against decode as CPUs do."""

import asyncio

import jax
import numpy as np
import pytest

from jaxrl.device_thread import DeviceThread
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.engine import model_runner, token_sampling
from jaxrl.rollout.engine.jax_engine import JaxEngine
from jaxrl.types import SamplingParams
from tests.models import small

GREEDY = {'temperature': 0.0}
MIXES = {
  'greedy': [GREEDY, GREEDY, GREEDY],
  'plain': [{}, GREEDY, {'temperature': 0.5}],
  'truncated': [{'top_p': 0.7}, GREEDY, {'top_k': 3}],
}


def rules(mix):
  return [
    SamplingParams(max_tokens=4 + 5 * i, seed=i, stop_token_ids=(7, 8, 9), **options)
    for i, options in enumerate(MIXES[mix])
  ]


@pytest.mark.parametrize('mix', MIXES)
def test_the_host_knows_what_sampling_needs(mix):
  assert token_sampling.needs_of(rules(mix)) == mix
  assert token_sampling.needs_of(rules(mix)[::-1]) == mix


def test_truncation_of_greedy_requests_needs_nothing():
  request = SamplingParams(1, temperature=0.0, top_p=0.5, top_k=3)
  assert token_sampling.needs_of([request]) == token_sampling.GREEDY
  assert token_sampling.needs_of([]) == token_sampling.GREEDY


def replies(mixes):
  """What an engine answers to each mix, and the programs that decoded."""
  model, params = small.model_and_params()
  device_thread = DeviceThread()
  engine = JaxEngine(
    TransformerLM(model.config),
    device_thread=device_thread,
    max_num_seqs=4,
    max_length=64,
    decode_steps=4,
    prompt_buckets=[32],
  )

  async def run():
    await engine.load(0, params)
    await engine.warmup()
    count, answers = engine.compile_count, []
    for mix in mixes:
      prompts = small.tokens(3, 20).tolist()
      work = (
        engine.generate(f'{mix}{i}', prompt, rule)
        for i, (prompt, rule) in enumerate(zip(prompts, rules(mix), strict=True))
      )
      answers += await asyncio.gather(*work)
    assert engine.compile_count == count
    return answers

  answers = asyncio.run(run())
  device_thread.close()
  return answers, set(engine._model_runner._decode)


def test_tokens_are_those_of_the_loop_that_ends_early(monkeypatch):
  expected, programs = replies(MIXES)
  assert programs == {token_sampling.ANY}
  monkeypatch.setattr(model_runner, 'platform_of', lambda platform: 'gpu')
  actual, programs = replies(MIXES)
  assert programs == set(token_sampling.STATIC_NEEDS)
  ends = [one.finish_reason for one in expected]
  assert {'stop', 'length'} <= set(ends)
  for one, other in zip(actual, expected, strict=True):
    np.testing.assert_array_equal(one.tokens, other.tokens)
    # The joined products may round otherwise.
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert one.finish_reason == other.finish_reason


@pytest.mark.parametrize('mix', MIXES)
def test_programs_draw_the_same_bits(mix):
  logits = np.random.default_rng(0).normal(0, 2, (3, 1001)).astype(np.float32)
  keys = np.stack([np.zeros(3), np.arange(3)], axis=1).astype(np.uint32)
  options = rules(mix)
  arrays = (
    np.array([getattr(rule, name) for rule in options], dtype)
    for name, dtype in (('temperature', 'f4'), ('top_p', 'f4'), ('top_k', 'i4'))
  )
  arguments = logits, keys, np.arange(3, dtype=np.int32), *arrays
  draw = jax.jit(token_sampling.sample_tokens, static_argnames='needs')
  able = token_sampling.STATIC_NEEDS[token_sampling.STATIC_NEEDS.index(mix) :]
  expected = draw(*arguments)
  for needs in able:
    for one, other in zip(draw(*arguments, needs=needs), expected, strict=True):
      np.testing.assert_array_equal(one, other)
