"""Sleep and wake, on a vLLM whose platform frees nothing: calls and requests alone."""

import asyncio

import numpy as np
import pytest

from jaxrl.options import ConfigError
from jaxrl.types import SamplingParams
from tests.rollout.vllm.needs import VLLM

pytestmark = [*VLLM, pytest.mark.asyncio(loop_scope='session')]
PROMPT, RULES = [5, 6, 7], SamplingParams(max_tokens=8, seed=3)


async def test_what_sleeps_takes_weights_and_serves_when_it_is_awake(world):
  engine = world.engine
  await engine.load(world.next(), world.old)
  await engine.sleep()
  assert set(engine._asleep) == {'weights', 'kv_cache'}
  assert await engine._llm.is_sleeping()
  waiting = asyncio.create_task(engine.generate('waits', PROMPT, RULES))
  await engine.load(version := world.next(), world.new)
  assert engine._asleep == ('kv_cache',)  # so that there is room for both's weights
  await asyncio.sleep(0.2)
  assert not waiting.done() and engine.seconds_since_progress == 0.0
  await engine.sleep()  # once more, from half awake
  assert set(engine._asleep) == {'weights', 'kv_cache'}
  await engine.resume()
  assert engine._asleep == ()
  completion = await asyncio.wait_for(waiting, 60)
  assert set(completion.weights_versions) == {version} and len(completion.tokens) == 8
  learners = world.rescore(world.new, PROMPT, completion.tokens)
  np.testing.assert_allclose(completion.logprobs, learners, atol=1e-4)


async def test_those_who_run_end_before_it_sleeps(world):
  engine, rules = world.engine, SamplingParams(max_tokens=60, seed=1)
  await engine.load(world.next(), world.old)
  running = asyncio.create_task(engine.generate('runs', PROMPT, rules))
  known = {}
  while not running.done() and not ('runs' in known and len(known['runs'].tokens)):
    await asyncio.sleep(0.002)  # what has not reached vLLM yet waits until it wakes
    known = await engine.progress(['runs'])
  await engine.sleep()
  try:  # those who come after it in this process need it awake
    assert len((await asyncio.wait_for(running, 60)).tokens) == 60
  finally:
    await engine.resume()


async def test_memory_cannot_be_given_up_where_vllm_cannot(world):
  from jaxrl.rollout.vllm.vllm_engine import VllmEngine

  with pytest.raises(ConfigError, match=r'vLLM refuses the options .*[Ss]leep mode'):
    VllmEngine(world.folder, max_num_seqs=2, max_length=32, enable_sleep_mode=True)
