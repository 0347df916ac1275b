"""Lanes: the same answers as one lane of their size, prompts shared within each."""

import asyncio
import functools
import itertools

import jax
import numpy as np
import pytest

from jaxrl.device_thread import DeviceThread
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.engine import threaded_decode
from jaxrl.rollout.engine.engine_base import EngineRequest
from jaxrl.rollout.engine.jax_engine import JaxEngine
from jaxrl.rollout.engine.scheduler import Scheduler
from jaxrl.rollout.engine.threaded_decode import ThreadedDecoder, choose_decode_threads
from jaxrl.types import SamplingParams

MODEL = TransformerLM(
  ModelConfig(
    vocab_size=48,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    num_experts=4,
    num_experts_per_token=2,
    moe_intermediate_size=16,
    family='qwen3_moe',
  )
)


@functools.cache
def first_weights():
  return MODEL.init(jax.random.key(0))


@pytest.fixture
def device_thread():
  thread = DeviceThread()
  yield thread
  thread.close()


def engine(device_thread: DeviceThread, slots: int, count: int) -> JaxEngine:
  return JaxEngine(
    MODEL,
    device_thread=device_thread,
    max_num_seqs=slots,
    decode_threads=count,
    max_length=32,
    decode_steps=3,
    prompt_buckets=[16],
    prefill_tokens=32 * count,  # of all lanes together
    router_replay=True,
  )


async def play(engine: JaxEngine, groups: int, samples: int):
  """`samples` completions for each of `groups` prompts, all lengths different."""
  draw = np.random.default_rng(0)
  work = []
  for group in range(groups):
    prompt = draw.integers(0, 48, 5 + group).tolist()
    for member in range(samples):
      most, seed = 4 + 3 * member + group, group * 100 + member
      rules = SamplingParams(max_tokens=most, seed=seed)
      work.append(engine.generate(f'{group}/{member}', prompt, rules))
  return await asyncio.gather(*work)


@pytest.mark.slow
async def test_lanes_answer_as_an_engine_of_one_lanes_slots(device_thread):
  runs = []
  for slots, count in ((6, 3), (2, 1)):
    jax_engine = engine(device_thread, slots, count)
    await jax_engine.load(7, first_weights())
    await jax_engine.warmup()
    compiled = jax_engine.compile_count
    runs.append(await play(jax_engine, groups=4, samples=3))
    assert jax_engine.compile_count == compiled  # all lanes run the same programs
  for one, other in zip(*runs, strict=True):
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.logprobs, other.logprobs)
    np.testing.assert_array_equal(one.routed_experts, other.routed_experts)
    assert set(one.weights_versions) == {7} and one.finish_reason == other.finish_reason


@pytest.mark.slow
async def test_lanes_go_on_after_an_error_and_after_sleep(device_thread, monkeypatch):
  jax_engine = engine(device_thread, 4, 2)
  await jax_engine.load(0, first_weights())
  before = await play(jax_engine, groups=2, samples=2)
  decode, calls = jax_engine._model_runner.partition_runner.decode, itertools.count()

  def failing(*args):
    if next(calls) == 0:
      raise RuntimeError('a lane broke')
    return decode(*args)

  monkeypatch.setattr(jax_engine._model_runner.partition_runner, 'decode', failing)
  with pytest.raises(RuntimeError, match='a lane broke'):
    await play(jax_engine, groups=2, samples=2)
  again = await play(jax_engine, groups=2, samples=2)
  await jax_engine.sleep()
  await jax_engine.resume()
  slept = await play(jax_engine, groups=2, samples=2)
  for runs in zip(before, again, slept, strict=True):
    for other in runs[1:]:
      np.testing.assert_array_equal(runs[0].tokens, other.tokens)
      np.testing.assert_array_equal(runs[0].logprobs, other.logprobs)


@pytest.mark.parametrize('count', [-2, 3])
def test_slots_divide_into_lanes(device_thread, count):
  with pytest.raises(ValueError, match=f'max_num_seqs=4 .* decode_threads={count}'):
    engine(device_thread, 4, count)


def test_exact_mode_has_one_lane(device_thread):
  with pytest.raises(ValueError, match='in one program, not with decode_threads=2'):
    JaxEngine(
      MODEL, device_thread=device_thread, max_num_seqs=4, decode_threads=2, exact=True
    )
  assert '2 devices' in threaded_decode.decode_threads_error(
    2, 4, exact=False, devices=2
  )


@pytest.mark.parametrize(
  ('slots', 'processors', 'wanted'),
  [(64, 2, 2), (64, 1, 1), (64, 16, 2), (63, 2, 1), (96, 2, 2), (96, 8, 3), (48, 8, 1)],
)
def test_as_many_lanes_as_processors_and_slots_allow(
  monkeypatch, slots, processors, wanted
):
  monkeypatch.setattr(threaded_decode, 'cpu_count', lambda: processors)
  assert choose_decode_threads(slots, 'cpu', 1, exact=False) == wanted
  assert choose_decode_threads(slots, 'cpu', 1, exact=True) == 1
  assert choose_decode_threads(slots, 'cpu', 2, exact=False) == 1
  assert choose_decode_threads(slots, 'gpu', 1, exact=False) == 1


def seat(table: Scheduler, *prompts: int):
  def request(text):
    prompt = np.array([text, text], np.int32)
    return EngineRequest(
      f'{text}', prompt, SamplingParams(max_tokens=1), 1, future=None
    )

  for text in prompts:
    table.add(request(text))
  return table.schedule(weights_version=0)


def test_a_group_stays_in_a_lane_and_lanes_are_as_busy_as_each_other():
  plan = seat(Scheduler(16, num_partitions=2), *[1] * 2, *[2] * 2, *[3] * 2, *[4] * 2)
  assert [slot for slot, _ in plan.assignments] == [0, 1, 8, 9, 2, 3, 10, 11]
  assert [slot for slot, _ in plan.prefill] == [0, 8, 2, 10]
  assert plan.copies == [(0, 1, 2), (8, 9, 2), (2, 3, 2), (10, 11, 2)]


def test_groups_of_half_a_lane_are_prefilled_once():
  plan = seat(Scheduler(64, num_partitions=2), *np.repeat(range(4), 16).tolist())
  assert len(plan.prefill) == 4


def test_a_large_group_is_in_both_lanes_and_its_prompt_prefilled_in_each():
  plan = seat(Scheduler(16, num_partitions=2), *[1] * 12)
  slots = [slot for slot, _ in plan.assignments]
  assert sorted(slot // 8 for slot in slots) == [0] * 6 + [1] * 6
  assert [slot // 8 for slot, _ in plan.prefill] == [0, 1]
  assert all(source // 8 == target // 8 for source, target, _ in plan.copies)


def test_a_prompt_finds_the_slot_that_it_left():
  table = Scheduler(4, num_partitions=2)
  seat(table, 1, 2)
  for request in table.running:
    table.remove(request)
  plan = seat(table, 2, 1)
  assert [slot for slot, _ in plan.assignments] == [2, 0] and not plan.prefill


def test_no_lane_is_copied_from_another(device_thread):
  decoder: ThreadedDecoder = engine(device_thread, 4, 2)._model_runner
  with pytest.raises(ValueError, match='from partition 0 to partition 1'):
    decoder.copy_prompts(decoder.init_state()[0], [(0, 2, 3)])
