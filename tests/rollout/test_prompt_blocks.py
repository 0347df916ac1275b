"""Prompts in blocks: what begins like a cached prompt is not computed again."""

import asyncio
import itertools

import jax
import numpy as np
import pytest

from jaxrl.device_thread import DeviceThread
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.engine.engine_base import EngineRequest
from jaxrl.rollout.engine.jax_engine import JaxEngine
from jaxrl.rollout.engine.scheduler import Scheduler
from jaxrl.rollout.tinker.tenant_engine import TenantEngine
from jaxrl.types import SamplingParams
from tests.marks import slow
from tests.models.families import cases
from tests.rollout.test_jax_engine import CONFIG, prompt, same, weights_of
from tests.rollout.test_speculative_decode import EXPERTS

BLOCK = 8


def make_engine(device_thread, config: ModelConfig = CONFIG, **options) -> JaxEngine:
  return JaxEngine(
    TransformerLM(config),
    device_thread=device_thread,
    max_num_seqs=4,
    max_length=160,
    decode_steps=4,
    prefill_tokens=16,
    **{'prompt_block': BLOCK, **options},
  )


async def session(engine, name, seed, turns=4, first=29):
  """Plays a session whose prompts each contain the turn before."""
  ids, done = prompt(seed, first), []
  for turn in range(turns):
    rules = SamplingParams(max_tokens=6, seed=100 * seed + turn)
    done.append((ids, rules, await engine.generate(f'{name}/{turn}', ids, rules)))
    ids = [*ids, *done[-1][2].tokens.tolist(), *prompt(seed + turn, 11)]
  return done


async def test_equal_prompts_alone_are_shared_by_default():
  """A group's prompt is computed once; the next turn is computed from its start."""
  device_thread = DeviceThread()
  engine = make_engine(device_thread, prompt_block=0)
  await engine.load(0, weights_of(0))
  ids = prompt(0, 20)
  rules = [SamplingParams(max_tokens=4, seed=seed) for seed in range(4)]
  await asyncio.gather(
    *(engine.generate(f'g/{i}', ids, rule) for i, rule in enumerate(rules))
  )
  figures = engine.metrics()
  assert (figures['tokens/prefilled'], figures['tokens/prompt_reused']) == (20, 60)
  played = await session(engine, 's', 1)
  figures = engine.metrics()
  assert figures['tokens/prefilled'] == sum(len(ids) for ids, _, _ in played)
  assert figures['tokens/prompt_reused'] == 0
  device_thread.close()


async def test_a_session_s_turn_computes_what_is_new():
  device_thread = DeviceThread()
  engine = make_engine(device_thread)
  await engine.load(0, weights_of(0))
  await engine.warmup()
  compiled = engine.compile_count
  played = await session(engine, 's', 1)
  figures = engine.metrics()
  lengths = [len(ids) for ids, _, _ in played]
  kept = [(length - 1) // BLOCK * BLOCK for length in lengths[:-1]]
  assert figures['tokens/prompt_reused'] == sum(kept)
  assert figures['tokens/prefilled'] == sum(lengths) - sum(kept)
  assert engine.compile_count == compiled
  await engine.load(1, weights_of(0))  # other weights know nothing of it
  ids, rules, before = played[-1]
  same(before, await engine.generate('again', ids, rules))
  assert engine.metrics()['tokens/prompt_reused'] == 0
  device_thread.close()


@pytest.mark.parametrize(
  ('config', 'options'),
  [
    (CONFIG, {}),
    slow(CONFIG, {'exact': True}),
    slow(CONFIG, {'decode_threads': 2}),
    slow(CONFIG, {'weights_dtype': 'bfloat16'}),
    slow(CONFIG, {'weights_dtype': 'int8', 'weights_block': 8}),
    slow(CONFIG.replace(**EXPERTS), {'router_replay': True}),
    slow(CONFIG, {'draft_tokens': 2}),
  ],
)
async def test_bits_are_those_of_a_prompt_that_shares_nothing(config, options):
  """Sessions side by side, branches and late partings, in slots used many times."""
  params = weights_of(0)
  if config is not CONFIG:
    params = TransformerLM(config).init(jax.random.key(0))
  device_thread, random = DeviceThread(), np.random.default_rng(0)
  engine = make_engine(device_thread, config, **options)
  await engine.load(0, params)
  played = list(
    itertools.chain(
      *await asyncio.gather(*(session(engine, f's{i}', 1 + i // 2) for i in range(6)))
    )
  )
  branches = []
  for i in range(14):  # from anywhere in a session
    ids = played[int(random.integers(len(played)))][0]
    cut = int(random.integers(1, len(ids) + 1))
    branches.append([*ids[:cut], *prompt(i // 2, int(random.integers(0, 30)))])
  rules = [SamplingParams(max_tokens=5, seed=i) for i in range(14)]
  works = (
    engine.generate(f'b{i}', ids, rule)
    for i, (ids, rule) in enumerate(zip(branches, rules, strict=True))
  )
  done = await asyncio.gather(*works)
  played += zip(branches, rules, done, strict=True)
  assert engine.metrics()['tokens/prompt_reused'] > 500
  for i, (ids, rule, shared) in enumerate(played):
    engine._scheduler._forget_prompts()
    alone = await engine.generate(f'a{i}', ids, rule)
    same(alone, shared)
    if shared.routed_experts is not None:
      np.testing.assert_array_equal(alone.routed_experts, shared.routed_experts)
  assert engine.metrics()['tokens/prompt_reused'] == 0
  device_thread.close()


@pytest.mark.parametrize('exact', [False, slow(True)])
async def test_tokens_are_those_of_whole_prompts(exact):
  """Another program rounds otherwise; in exact mode bits are the same."""
  device_thread, found = DeviceThread(), []
  for block in (0, BLOCK):
    engine = make_engine(device_thread, prompt_block=block, exact=exact)
    await engine.load(0, weights_of(0))
    found.append(await session(engine, 's', 5))
  for (_, _, one), (_, _, two) in zip(*found, strict=True):
    if exact:
      same(one, two)
    np.testing.assert_array_equal(one.tokens, two.tokens)
    np.testing.assert_allclose(one.logprobs, two.logprobs, atol=2e-5)
  device_thread.close()


def seat(scheduler: Scheduler, *prompts: list[int]):
  for ids in prompts:
    rules = SamplingParams(max_tokens=1)
    tokens = np.array(ids, np.int32)
    scheduler.add(EngineRequest('', tokens, rules, 1, None))  # pyright: ignore
  return scheduler.schedule(0)


def staged(plan):
  return [[(one.slot, one.start, one.source) for one in stage] for stage in plan.staged]


def test_prompts_of_one_dispatch_copy_from_each_other_in_stages():
  scheduler = Scheduler(5, prompt_block=2)
  root = [1, 2, 3, 4, 5]
  plan = seat(scheduler, root, [*root[:4], 9, 9, 9], root, [*root[:4], 9, 9, 8], [1, 2])
  assert staged(plan) == [
    [(0, 0, None), (4, 0, None)],
    [(1, 4, 0), (2, 5, 0)],
    [(3, 6, 1)],
  ]
  assert plan.num_prefilled_tokens == 5 + 2 + 3 + 0 + 1
  assert not plan.prefill and not plan.copies


def test_a_prompt_s_last_token_is_not_shared_with_a_longer_prompt():
  """Decode computed its keys and values, not a block; they have other bits."""
  scheduler = Scheduler(2, prompt_block=2)
  seat(scheduler, [1, 2, 3, 4])
  assert staged(seat(scheduler, [1, 2, 3, 4, 5])) == [[(1, 2, 0)]]


def test_a_slot_that_is_free_goes_on_where_it_was():
  scheduler = Scheduler(2, prompt_block=2)
  plan = seat(scheduler, [1, 2, 3], [7, 8, 9])
  for _, request in plan.assignments:
    scheduler.remove(request)
  assert staged(seat(scheduler, [7, 8, 5], [7, 8, 6])) == [[(1, 2, None)], [(0, 2, 1)]]
  assert scheduler.num_busy == 2
  assert set(scheduler._block_index) == {(0, np.array([7, 8], np.int32).tobytes())}


def test_what_keeps_no_prompts_is_refused():
  device_thread = DeviceThread()
  kinds = ('full', (('window', 0),)), ('windowed', (('window', 9),))
  windowed = CONFIG.replace(layer_types=('windowed', 'full'), layer_kinds=kinds)
  with pytest.raises(ValueError, match=r'prompt_block=8.*windows shorter'):
    make_engine(device_thread, windowed)
  with pytest.raises(ValueError, match=r'prompt_block=8.*DeltaNet'):
    make_engine(device_thread, cases.ours('qwen3_5')[0])
  with pytest.raises(ValueError, match=r'prompt_block=8.*adapters of their own'):
    TenantEngine(
      TransformerLM(CONFIG),
      None,
      device_thread=device_thread,
      max_adapters=2,
      max_rank=4,
      max_length=64,
      prompt_block=8,
    )
  device_thread.close()
