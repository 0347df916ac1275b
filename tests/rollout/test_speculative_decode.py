"""Drafted tokens: the same bits as without them, in fewer steps if text repeats."""

import asyncio
import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxrl.device_thread import DeviceThread
from jaxrl.models.decoding.draft_rows import DraftRows
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.engine import speculative_decode
from jaxrl.rollout.engine.cache_uses import DRAFTS
from jaxrl.rollout.engine.jax_engine import JaxEngine
from jaxrl.rollout.tinker.tenant_engine import TenantEngine
from jaxrl.types import SamplingParams
from tests.marks import slow
from tests.models.families import cases
from tests.rollout.test_jax_engine import Letters
from tests.rollout.test_jax_engine_control import started, until

CONFIG = ModelConfig(
  vocab_size=48,
  hidden_size=32,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  intermediate_size=48,
)
EXPERTS = {
  'num_experts': 4,
  'num_experts_per_token': 2,
  'moe_intermediate_size': 16,
  'family': 'qwen3_moe',
}


@functools.cache
def weights_of(model, seed, scale=3):
  return jax.tree.map(lambda x: x * scale, model.init(jax.random.key(seed)))


def work_of(seed, count, longest=150):
  """Prompts that repeat themselves, and rules of every kind."""
  random, work = np.random.default_rng(seed), []
  for _ in range(count):
    piece = random.integers(0, 48, random.integers(2, 9))
    length = int(random.integers(1, longest - 60))
    ids = np.tile(piece, 60)[:length]
    noise = random.random(length) < random.choice([0.0, 0.1])
    ids = np.where(noise, random.integers(0, 48, length), ids).tolist()
    rules = SamplingParams(
      max_tokens=int(random.integers(1, 60)),
      temperature=float(random.choice([0.0, 0.3, 1.0])),
      top_p=float(random.choice([1.0, 1.0, 0.8])),
      top_k=int(random.choice([0, 0, 5])),
      stop_token_ids=tuple(random.integers(0, 48, random.integers(0, 2)).tolist()),
      seed=int(random.integers(0, 2**40)),
    )
    work.append((ids, rules))
  return work


async def answers(model, params, work, *, at_once, slots, draft_tokens, **options):
  device_thread = DeviceThread()
  defaults = {'max_length': 150, 'decode_steps': 4, 'prompt_buckets': [32, 150]}
  engine = JaxEngine(
    model,
    device_thread=device_thread,
    max_num_seqs=slots,
    draft_tokens=draft_tokens,
    **{'draft_match': 2, **defaults, **options},
  )
  await engine.load(0, params)
  gate, done = asyncio.Semaphore(at_once), []

  async def ask(i, ids, rules):
    async with gate:
      return await engine.generate(str(i), ids, rules)

  done = await asyncio.gather(*(ask(i, *one) for i, one in enumerate(work)))
  device_thread.close()
  return done, engine.metrics()


def same(one, other):
  np.testing.assert_array_equal(one.tokens, other.tokens)
  np.testing.assert_array_equal(one.logprobs, other.logprobs)
  assert one.finish_reason == other.finish_reason
  if one.routed_experts is not None:
    np.testing.assert_array_equal(one.routed_experts, other.routed_experts)


@pytest.mark.parametrize(
  ('config', 'options'),
  [
    (CONFIG, {}),
    *(
      slow(config, options)
      for config, options in (
        (CONFIG, {'exact': True}),
        (CONFIG, {'decode_threads': 2}),
        (CONFIG, {'weights_dtype': 'bfloat16'}),
        (CONFIG, {'weights_dtype': 'int8', 'weights_block': 8}),
        (CONFIG.replace(**EXPERTS), {'router_replay': True}),
      )
    ),
  ],
)
async def test_bits_are_those_without_drafts(config, options):
  """Of prompts, samplers, lengths of drafts and numbers of requests at once."""
  model, work = TransformerLM(config), work_of(0, 24)
  params, rest = weights_of(model, 0), {'slots': 8} | options
  expected, _ = await answers(model, params, work, at_once=8, draft_tokens=0, **rest)
  for draft_tokens, at_once in ((1, 3), (4, 1), (4, 8), (7, 3)):
    found, metrics = await answers(
      model, params, work, at_once=at_once, draft_tokens=draft_tokens, **rest
    )
    for one, other in zip(expected, found, strict=True):
      same(one, other)
    assert metrics['tokens/accepted'] > 10
    assert metrics['tokens/drafted'] > metrics['tokens/accepted'] + 10


def naive_draft(tokens, most, match):
  """The tokens after the last earlier place where the last `match` tokens occur."""
  last = len(tokens) - 1
  for end in range(last - 1, match - 2, -1):
    if tokens[end - match + 1 : end + 1] == tokens[last - match + 1 :]:
      following = list(tokens)
      for _ in range(most):  # what is drafted goes on repeating
        following.append(following[end + len(following) - last])
      return following[last + 1 :]
  return None


@pytest.mark.parametrize('match', [1, 2, 3])
def test_drafts_follow_the_last_occurrence(match):
  random = np.random.default_rng(match)
  lengths = random.integers(1, 30, 200)
  history = random.integers(0, 3, (200, 30)).astype(np.int32)
  drafting = speculative_decode.Drafting(5, match)
  drafts, is_found = speculative_decode.find_drafts(
    jax.numpy.asarray(history), jax.numpy.asarray(lengths - 1), drafting
  )
  expected = [
    naive_draft(row[:length].tolist(), 5, match)
    for row, length in zip(history, lengths, strict=True)
  ]
  np.testing.assert_array_equal(is_found, [draft is not None for draft in expected])
  assert 20 < np.sum(is_found) < 200
  for draft, found in zip(expected, drafts, strict=True):
    if draft is not None:
      np.testing.assert_array_equal(found, draft)


def placed(is_busy, positions, wanted):
  array = jax.numpy.asarray
  return DraftRows.place(array(is_busy), array(positions), array(wanted), 2)


def test_rows_of_idle_slots_go_to_first_tokens_first():
  is_busy = np.array([True, False, True, False, False, True])
  positions = np.array([5, 99, 7, 99, 99, 20], np.int32)
  rows = placed(is_busy, positions, np.array([2, 0, 1, 0, 0, 0]))
  np.testing.assert_array_equal(rows.slots, [0, 0, 2, 2, 0, 5])
  np.testing.assert_array_equal(rows.offsets, [0, 1, 0, 1, 2, 0])
  np.testing.assert_array_equal(rows.row_positions, [5, 6, 7, 8, 7, 20])
  np.testing.assert_array_equal(rows.granted, [2, 0, 1, 0, 0, 0])
  np.testing.assert_array_equal(
    rows.index[:, [0, 2, 5]], [[0, 2, 5], [1, 3, 5], [4, 2, 5]]
  )
  few = placed(is_busy, positions, np.array([2, 0, 2, 0, 0, 1]))
  np.testing.assert_array_equal(few.granted, [1, 0, 1, 0, 0, 1])
  none = placed(np.ones(6, bool), positions, np.full(6, 2))
  np.testing.assert_array_equal(none.slots, np.arange(6))
  assert none.depth == 0 and not none.granted.any()


def copier():
  """Weights whose greedy reply repeats: a token decides which one follows it."""
  model = TransformerLM(CONFIG)
  params = weights_of(model, 0)
  quiet = jax.tree.map(lambda x: x * 0, params['layers'])
  return model, params | {'layers': quiet}


async def test_repeating_replies_take_fewer_steps():
  model, params = copier()
  work = [([1, 2, 3], SamplingParams(max_tokens=60, temperature=0.0))]
  options = {'at_once': 1, 'slots': 8}
  expected, plain = await answers(model, params, work, draft_tokens=0, **options)
  found, metrics = await answers(model, params, work, draft_tokens=4, **options)
  same(expected[0], found[0])
  assert plain['rollout/decode_steps'] == 60
  assert 'tokens/drafted' not in plain
  assert metrics['tokens/generated'] == 60
  assert metrics['rollout/decode_steps'] < 30
  accepted = metrics['tokens/accepted']
  assert accepted == 60 - metrics['rollout/decode_steps']
  assert accepted <= metrics['tokens/drafted'] <= accepted + 8
  assert metrics['rollout/tokens_per_dispatch'] > plain['rollout/decode_steps'] / 15


async def test_full_slots_draft_nothing():
  model, params = copier()
  rules = SamplingParams(max_tokens=40, temperature=0.0)
  work = [([i, 2, 3], rules) for i in range(4)]
  _, metrics = await answers(model, params, work, at_once=4, slots=4, draft_tokens=4)
  assert metrics['tokens/drafted'] == 0
  assert metrics['rollout/decode_steps'] == 40


async def test_a_request_whose_drafts_are_refused_makes_few():
  """Every bigram was seen before, but what followed then says nothing."""
  model, params = copier()
  params = params | {'embedding': jax.tree.map(lambda x: x * 0, params['embedding'])}
  draw = np.random.default_rng(0)
  ids = draw.integers(0, 48, 90).tolist()
  rules = SamplingParams(max_tokens=400, seed=1)
  _, metrics = await answers(
    *(model, params, [(ids, rules)]),
    at_once=1,
    slots=8,
    draft_tokens=4,
    draft_match=1,
    max_length=500,
    prompt_buckets=[128],
  )
  budget = speculative_decode.MAX_CREDIT // speculative_decode.COST
  most = budget + metrics['tokens/accepted'] * 4 + 400 // speculative_decode.COST + 4
  assert budget <= metrics['tokens/drafted'] <= most < 200
  assert metrics['tokens/accepted'] < 20


async def test_stop_strings_limits_and_new_weights_are_as_without():
  """What ends a reply in the middle of a draft ends it; weights change in between."""
  model, params = copier()
  device_thread, found = DeviceThread(), {}
  for draft_tokens in (0, 4):
    engine = JaxEngine(
      model,
      Letters(),
      device_thread=device_thread,
      max_num_seqs=4,
      max_length=64,
      decode_steps=2,
      draft_tokens=draft_tokens,
      draft_match=2,
    )
    await engine.load(0, params)
    await engine.warmup()
    compiled = engine.compile_count
    free = await engine.generate('a', [1, 2, 3], SamplingParams(30, temperature=0.0))
    text = Letters().decode(free.tokens, False)
    stop = text[17:20]
    rules = SamplingParams(30, temperature=0.0, stop=(stop,))
    stopped = await engine.generate('b', [1, 2, 3], rules)
    window = await engine.generate('c', [1, 2, 3], SamplingParams(500, temperature=0.0))
    assert len(window.tokens) == 61 and window.finish_reason == 'length'
    count = len(stopped.tokens)
    later = dataclasses.replace(rules, num_generated=count, stop=())
    resumed = await engine.generate('d', [1, 2, 3, *stopped.tokens.tolist()], later)
    found[draft_tokens] = free, stopped, window, resumed

    other = jax.tree.map(lambda x: x * 1.5, params)
    task = asyncio.create_task(
      engine.generate('e', [1, 2, 3], SamplingParams(60, temperature=0.0))
    )
    await until(started(engine, 'e'))
    await engine.load(1, other)
    mixed = await task
    assert set(mixed.weights_versions) == {0, 1} and len(mixed.tokens) == 60
    switch = int(np.sum(mixed.weights_versions == 0))
    # Their keys and values are zero either way, so both versions can be checked.
    np.testing.assert_array_equal(mixed.logprobs[:switch], window.logprobs[:switch])
    rest = [1, 2, 3, *mixed.tokens[:switch].tolist()]
    tail = await engine.generate('f', rest, SamplingParams(60, temperature=0.0))
    np.testing.assert_array_equal(mixed.tokens[switch:], tail.tokens[: 60 - switch])
    np.testing.assert_array_equal(mixed.logprobs[switch:], tail.logprobs[: 60 - switch])
    assert engine.compile_count == compiled
  for one, two in zip(*found.values(), strict=True):
    same(one, two)
  device_thread.close()


async def test_aborts_leave_a_prefix_of_the_reply():
  model, params = copier()
  device_thread = DeviceThread()
  engine = JaxEngine(
    model,
    device_thread=device_thread,
    max_num_seqs=4,
    max_length=300,
    decode_steps=2,
    draft_tokens=4,
  )
  await engine.load(0, params)
  rules = SamplingParams(250, temperature=0.0)
  whole = await engine.generate('a', [1, 2, 3], rules)
  task = asyncio.create_task(engine.generate('b', [1, 2, 3], rules))
  await until(started(engine, 'b'))
  await engine.abort('b')
  part = await task
  assert part.finish_reason == 'abort' and 0 < len(part.tokens) < 250
  np.testing.assert_array_equal(part.tokens, whole.tokens[: len(part.tokens)])
  same(whole, await engine.generate('c', [1, 2, 3], rules))
  device_thread.close()


def refused(config, **options):
  device_thread = DeviceThread()
  try:
    JaxEngine(
      TransformerLM(config), device_thread=device_thread, draft_tokens=2, **options
    )
  finally:
    device_thread.close()


def test_what_cannot_drop_a_draft_is_refused():
  with pytest.raises(ValueError, match=r'draft_tokens=2.*DeltaNet'):
    refused(cases.ours('qwen3_5')[0])
  kinds = ('full', (('window', 0),)), ('windowed', (('window', 9),))
  windowed = CONFIG.replace(layer_types=('windowed', 'full'), layer_kinds=kinds)
  with pytest.raises(ValueError, match=r'draft_tokens=2.*windows shorter'):
    refused(windowed)
  refused(windowed, exact=True)  # whose cache keeps all positions
  check = functools.partial(DRAFTS.obstacle, CONFIG, keeps_prompts=True)
  assert check(platform='cpu', devices=1) == ''
  assert 'a GPU' in check(platform='gpu', devices=1)
  assert '4 devices' in check(platform='cpu', devices=4)


def test_engines_of_tenants_draft_nothing():
  device_thread = DeviceThread()
  with pytest.raises(ValueError, match=r'draft_tokens=3.*adapters of their own'):
    TenantEngine(
      TransformerLM(CONFIG),
      None,
      device_thread=device_thread,
      max_adapters=2,
      max_rank=4,
      max_length=64,
      draft_tokens=3,
    )
  device_thread.close()
