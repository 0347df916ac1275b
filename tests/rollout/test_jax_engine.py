"""The engine against its protocol: what a request may count on."""

import asyncio
import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxrl.device_thread import DeviceThread
from jaxrl.models.exact_mode import Exact
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.engine.jax_engine import JaxEngine
from jaxrl.rollout.engine.model_runner import default_buckets
from jaxrl.types import PromptTooLongError, SamplingParams
from kernels.native import row_product
from tests.marks import NEEDS_COMPILER
from tests.models.families import cases

CONFIG = ModelConfig(
  vocab_size=48,
  hidden_size=32,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  intermediate_size=48,
)
MODEL = TransformerLM(CONFIG)


@functools.cache
def weights_of(number):
  """Other weights for each number."""
  return jax.tree.map(lambda x: x * 3, MODEL.init(jax.random.key(number)))


class Letters:
  """A tokenizer of one letter a token; token 47 is two letters."""

  def decode(self, tokens, skip_special_tokens=True):
    assert not skip_special_tokens
    return ''.join('zz' if t == 47 else chr(ord('A') + t) for t in tokens)


@pytest.fixture(scope='module')
def shared():
  """One compiled engine for the module: tests leave it idle."""
  device_thread = DeviceThread()
  yield JaxEngine(
    MODEL,
    Letters(),
    device_thread=device_thread,
    max_num_seqs=4,
    max_length=64,
    decode_steps=4,
    prompt_buckets=[16, 64],
    prefill_tokens=32,
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


def prompt(seed: int, length: int) -> list[int]:
  return np.random.default_rng(seed).integers(0, 47, length).tolist()


def same(one, two):
  np.testing.assert_array_equal(one.tokens, two.tokens)
  np.testing.assert_array_equal(one.logprobs, two.logprobs)
  assert one.finish_reason == two.finish_reason


@jax.jit
def score(params, row, segment_ids, temperature):
  return MODEL.policy_outputs(params, row, segment_ids, temperature=temperature)


def rescored(params, tokens, start, temperature=1.0):
  row = np.zeros((1, 64), np.int32)
  row[0, : len(tokens)] = tokens
  segment_ids = (np.arange(64) < len(tokens)).astype(np.int32)[None]
  outputs = score(params, row, segment_ids, temperature)
  return np.asarray(outputs.logprobs)[0, start : len(tokens)]


@pytest.mark.parametrize('length', [1, 2, 16, 17, 18, 40])
async def test_logprobs_are_those_of_the_policy(engine, length):
  ids = prompt(length, length)
  rules = SamplingParams(max_tokens=20, temperature=0.7, seed=5)
  done = await engine.generate('a', ids, rules)
  assert len(done.tokens) == 20 and done.finish_reason == 'length'
  expected = rescored(weights_of(0), [*ids, *done.tokens], length, 0.7)
  np.testing.assert_allclose(done.logprobs, expected, atol=2e-5)
  assert done.tokens.dtype == np.int32 and done.logprobs.dtype == np.float32
  np.testing.assert_array_equal(done.weights_versions, np.zeros(20))


@pytest.mark.slow
@pytest.mark.extended
async def test_windows_keep_no_more_than_they_show():
  """A prompt that decoding has overwritten is computed again; a group still shares."""
  kinds = ('full', (('window', 0),)), ('windowed', (('window', 9),))
  types = ('windowed', 'full', 'windowed')
  config = CONFIG.replace(num_layers=3, layer_types=types, layer_kinds=kinds)
  model = TransformerLM(config)
  params = jax.tree.map(lambda x: x * 3, model.init(jax.random.key(0)))
  device_thread = DeviceThread()
  engine = JaxEngine(
    model,
    Letters(),
    device_thread=device_thread,
    max_num_seqs=3,
    max_length=96,
    decode_steps=8,
    prefill_tokens=32,
  )
  cache = engine._model_runner.init_state()[0]
  sizes = [sum(chunk.shape[2] for chunk in chunks) for chunks in cache['v']]
  assert sizes == [32, 96, 32]
  await engine.load(0, params)
  ids = prompt(1, 45)

  async def ask(seed, length):
    rules = SamplingParams(max_tokens=length, seed=seed)
    done = await engine.generate(str(seed), ids, rules)
    tokens = np.array([[*ids, *done.tokens]])
    outputs = jax.jit(model.policy_outputs)(params, tokens, np.ones_like(tokens))
    expected = outputs.logprobs[0, len(ids) :]
    np.testing.assert_allclose(done.logprobs, expected, atol=2e-5)

  await asyncio.gather(*(ask(seed, 40) for seed in range(3)))
  assert engine._stats.num_reused == 2 * len(ids)
  for seed in range(3, 6):
    await ask(seed, 30)
  assert engine._stats.num_reused == 2 * len(ids)
  await asyncio.gather(*(ask(seed, 20 + seed) for seed in range(6, 11)))
  device_thread.close()


@pytest.mark.optimized
@pytest.mark.slow
@pytest.mark.parametrize(
  ('name', 'exact'),
  [('qwen3_5', False), ('qwen3_5', True), ('deepseek-v3', False), ('gemma4', False)],
)
async def test_states_latents_and_shared_keys_are_each_request_s_own(name, exact):
  """Slots are used again, groups share a prompt, and what was cut off goes on."""
  config, params = cases.ours(name)
  model = TransformerLM(config)
  device_thread = DeviceThread()
  engine = JaxEngine(
    model,
    Letters(),
    device_thread=device_thread,
    max_num_seqs=3,
    max_length=64,
    decode_steps=8,
    prompt_buckets=[32, 64],
    prefill_tokens=32,
    exact=exact,
  )
  await engine.load(0, params)
  if exact:
    model = dataclasses.replace(model, exact=Exact.for_slots(3))
  score = jax.jit(model.policy_outputs)

  def check(ids, done):
    row = np.zeros((1, 64), np.int32)
    count = len(ids) + len(done.tokens)
    row[0, :count] = [*ids, *done.tokens]
    outputs = score(params, row, (np.arange(64) < count).astype(np.int32)[None])
    expected = outputs.logprobs[0, len(ids) : count]
    np.testing.assert_allclose(
      done.logprobs, expected, rtol=0 if exact else 1e-7, atol=0 if exact else 2e-5
    )

  async def ask(name, ids, length):
    done = await engine.generate(name, ids, SamplingParams(max_tokens=length, seed=7))
    check(ids, done)
    return done

  ids = prompt(1, 25)
  group = await asyncio.gather(*(ask(f'a{i}', ids, 20 + i) for i in range(3)))
  assert engine._stats.num_reused == 2 * len(ids)
  again = await ask('again', ids, 20)
  # A state is gone, as are keys before a window, and computed again.
  kept = name == 'deepseek-v3'
  assert engine._stats.num_reused == (2 + kept) * len(ids)
  same(again, group[0])
  # More requests than slots, also of one token: nothing is left of a slot's last one.
  lengths = [1, 2, 30, 1, 17, 25, 1]
  await asyncio.gather(
    *(ask(f'b{i}', prompt(i, n), 5 + 3 * i) for i, n in enumerate(lengths))
  )
  cut = asyncio.create_task(
    engine.generate('cut', ids, SamplingParams(max_tokens=30, seed=7))
  )
  while not any(len(part.tokens) for part in (await engine.progress(['cut'])).values()):
    await asyncio.sleep(0.001)
  await engine.abort('cut')
  first = await cut
  assert 0 < len(first.tokens) < 30
  count = len(first.tokens)
  rules = SamplingParams(max_tokens=30 - count, seed=7, num_generated=count)
  rest = await engine.generate('rest', [*ids, *first.tokens], rules)
  check([*ids, *first.tokens], rest)
  whole = await ask('whole', ids, 30)
  np.testing.assert_array_equal([*first.tokens, *rest.tokens], whole.tokens)
  device_thread.close()


async def test_greedy_takes_the_policy_s_likeliest(engine):
  ids = prompt(0, 5)
  done = await engine.generate('a', ids, SamplingParams(8, temperature=0.0, seed=1))
  again = await engine.generate('b', ids, SamplingParams(8, temperature=0.0, seed=2))
  same(done, again)
  prefill = jax.jit(MODEL.prefill)
  row = np.zeros((1, 13), np.int32)
  row[0, :5], row[0, 5:] = ids, done.tokens
  for t in range(8):
    logits, _ = prefill(weights_of(0), row, np.array([5 + t], np.int32))
    assert np.argmax(logits) == done.tokens[t]


@pytest.mark.optimized
@pytest.mark.parametrize('seed', range(4))
async def test_a_request_depends_on_nothing_but_itself(engine, seed):
  """Bit for bit: alone, or among others, in any slot, arriving at any time."""
  random = np.random.default_rng(seed)
  prompts = [
    prompt(100 + i // 3, int(length))
    for i, length in enumerate(np.repeat(random.integers(1, 44, 5), 3))
  ]
  rules = [
    SamplingParams(
      max_tokens=int(random.integers(1, 30)),
      temperature=float(random.choice([0.0, 0.7, 1.0, 1.3])),
      top_p=float(random.choice([1.0, 1.0, 0.8])),
      top_k=int(random.choice([0, 0, 5])),
      stop_token_ids=tuple(random.integers(0, 48, random.integers(0, 3)).tolist()),
      seed=int(random.integers(0, 2**40)),
    )
    for _ in prompts
  ]
  alone = []
  for i in range(0, len(prompts), 4):
    alone.append((i, await engine.generate('solo', prompts[i], rules[i])))

  async def late(i, delay):
    for _ in range(delay):
      await asyncio.sleep(0.001)
    return await engine.generate(f'r{i}', prompts[i], rules[i])

  rounds = []
  for _ in range(2):
    order = random.permutation(len(prompts))
    jobs = {i: late(i, int(random.integers(0, 12))) for i in order}
    results = await asyncio.gather(*jobs.values())
    rounds.append(dict(zip(jobs, results, strict=True)))
    # Other weights in between: the next round remembers no prompt of this one.
    await engine.load(1, weights_of(1))
    await engine.generate('x', prompt(7, 30), SamplingParams(3))
    await engine.load(0, weights_of(0))
  for i, done in alone:
    same(done, rounds[0][i])
  for i in range(len(prompts)):
    same(rounds[0][i], rounds[1][i])


async def test_a_group_s_prompt_is_computed_once(engine):
  engine.metrics()
  ids = prompt(50, 20)
  rules = [SamplingParams(max_tokens=12, seed=i) for i in range(6)]
  jobs = [engine.generate(f'{i}', ids, rule) for i, rule in enumerate(rules)]
  results = await asyncio.gather(*jobs)
  figures = engine.metrics()
  assert figures['tokens/prefilled'] == 20
  assert figures['tokens/prompt_reused'] == 100
  assert figures['tokens/generated'] == 72
  assert len({tuple(r.tokens) for r in results}) == 6
  later = await engine.generate('later', ids, rules[3])
  assert engine.metrics()['tokens/prefilled'] == 0
  same(later, results[3])
  await engine.load(1, weights_of(1))
  await engine.generate('new weights', ids, rules[3])
  assert engine.metrics()['tokens/prefilled'] == 20


async def test_stop_tokens_end_and_stay(engine):
  ids = prompt(1, 6)
  free = await engine.generate('a', ids, SamplingParams(max_tokens=30, seed=3))
  last = int(free.tokens[9])
  first = free.tokens.tolist().index(last)
  rules = SamplingParams(max_tokens=30, seed=3, stop_token_ids=(50000, last))
  done = await engine.generate('a', ids, rules)
  np.testing.assert_array_equal(done.tokens, free.tokens[: first + 1])
  np.testing.assert_array_equal(done.logprobs, free.logprobs[: first + 1])
  assert done.finish_reason == 'stop'


@pytest.mark.parametrize('at', range(2, 14))
async def test_stop_strings_cut_where_they_complete(engine, at):
  ids = prompt(2, 6)
  free = await engine.generate('a', ids, SamplingParams(max_tokens=30, seed=4))
  stop = Letters().decode(free.tokens[at - 2 : at + 1], False)
  rules = SamplingParams(max_tokens=30, seed=4, stop=('nowhere', stop))
  done = await engine.generate('a', ids, rules)
  assert done.finish_reason == 'stop'
  assert stop in Letters().decode(done.tokens, False)
  assert stop not in Letters().decode(done.tokens[:-1], False)
  count = len(done.tokens)
  np.testing.assert_array_equal(done.tokens, free.tokens[:count])
  assert len(done.logprobs) == len(done.weights_versions) == count <= at + 1


async def test_the_window_ends_a_completion(engine):
  done = await engine.generate('a', prompt(3, 60), SamplingParams(max_tokens=99))
  assert len(done.tokens) == 4 and done.finish_reason == 'length'
  done = await engine.generate('b', prompt(3, 63), SamplingParams(max_tokens=99))
  assert len(done.tokens) == 1


@pytest.mark.parametrize(
  'ids, rules, message',
  [
    ([1] * 64, {}, '64 tokens .* window of 64'),
    ([], {}, 'row of token ids'),
    ([48], {}, '0 … 47'),
    ([-1], {}, '0 … 47'),
    ([1], {'max_tokens': 0}, 'max_tokens=0'),
    ([1], {'temperature': -1.0}, 'temperature=-1.0'),
    ([1], {'top_p': 0.0}, 'top_p=0.0'),
    ([1], {'top_k': -2}, 'top_k=-2'),
    ([1], {'seed': -1}, 'seed=-1'),
    ([1], {'stop': ('',)}, 'empty stop string'),
    ([1], {'stop_token_ids': tuple(range(9))}, '9 stop token ids .* max_stop_ids=8'),
  ],
)
async def test_what_cannot_be_served_is_refused(engine, ids, rules, message):
  with pytest.raises(ValueError, match=f"request 'bad': .*{message}") as refusal:
    await engine.generate('bad', ids, SamplingParams(**{'max_tokens': 4, **rules}))
  is_of_length = isinstance(refusal.value, PromptTooLongError)
  assert is_of_length == ('prompt of' in str(refusal.value))


def test_default_buckets_reach_the_window():
  assert default_buckets(96) == [32, 64, 96]
  assert default_buckets(32) == [32]
  assert default_buckets(20) == [20]
  assert default_buckets(256) == [32, 64, 128, 256]


def test_buckets_beyond_the_window_are_refused():
  with pytest.raises(ValueError, match='bucket 64 exceeds the window, max_length=32'):
    JaxEngine(
      MODEL, device_thread=DeviceThread(), max_length=32, prompt_buckets=[64, 16]
    )


async def test_an_engine_without_weights_says_so():
  device_thread = DeviceThread()
  empty = JaxEngine(MODEL, device_thread=device_thread, max_num_seqs=2, max_length=32)
  with pytest.raises(RuntimeError, match='load'):
    await empty.generate('a', [1], SamplingParams(1))
  await empty.load(0, weights_of(0))
  with pytest.raises(ValueError, match='tokenizer'):
    await empty.generate('a', [1], SamplingParams(1, stop=('x',)))
  device_thread.close()


async def greedy(weights_dtype):
  """What an engine replies, and the names of arrays in which it keeps matrices."""
  device_thread = DeviceThread()
  engine = JaxEngine(
    MODEL,
    device_thread=device_thread,
    max_num_seqs=4,
    max_length=64,
    weights_dtype=weights_dtype,
  )
  await engine.load(0, weights_of(0))
  layers = engine._loaded_weights()[1]['layers']
  kinds = {
    kind
    for layer in layers
    for part in (layer['attention'], layer['mlp'])
    for name, one in part.items()
    if not name.endswith('norm')
    for kind in one
  }
  rules = SamplingParams(max_tokens=12, temperature=0.0)
  prompts = [prompt(i, 9 + i) for i in range(4)]
  replies = await asyncio.gather(
    *(engine.generate(f'{i}', ids, rules) for i, ids in enumerate(prompts))
  )
  device_thread.close()
  return replies, kinds


@NEEDS_COMPILER
@pytest.mark.parametrize('dtype, kept', [('', 'kernel'), ('bfloat16', 'rows')])
async def test_without_a_c_compiler_it_replies_the_same(dtype, kept, monkeypatch):
  packed, kinds = await greedy(dtype)
  assert kinds == {'panels'}
  missing = 'needs a C compiler'
  monkeypatch.setattr(row_product, 'obstacle', lambda *_, **options: missing)
  plain, kinds = await greedy(dtype)
  assert kinds == {kept}
  for one, other in zip(packed, plain, strict=True):
    np.testing.assert_array_equal(one.tokens, other.tokens)
    # In bfloat16, x is rounded before each product, and where it falls between two
    # numbers the last bit decides.
    error = 0.05 if dtype else 1e-5
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=error)
