"""Prefill and decode: equal to the full forward, and bitwise independent of company."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models import kv_cache, layer_stack
from tests.marks import slow
from tests.models import small

# Three chunks of the cache; the first row crosses over to the last, where the third
# starts, the other stays in the first.
SLOTS, WINDOW, WIDTH = 5, 192, 144
LENGTHS = np.array([120, 5, 144], np.int32)
CHUNK, CHUNKS = 64, 3


class Decoder:
  """A model's jitted functions, the cache donated as an engine does it."""

  def __init__(self, **changes):
    self.model, self.params = small.model_and_params(**changes)
    self.prefill = functools.partial(jax.jit(self.model.prefill), self.params)
    self.insert = jax.jit(kv_cache.insert, donate_argnums=0)
    decode = jax.jit(self.model.decode, donate_argnums=1)
    self.decode = functools.partial(decode, self.params)

  def run(self, tokens, slots, steps, limit=None, others=0, lengths=LENGTHS):
    """Prefills rows, then feeds their next tokens; returns `[steps + 1, rows, V]`.

    others: token and position of the slots that hold no row.
    """
    logits, kept = self.prefill(tokens[:, :WIDTH], lengths)
    cache = self.model.init_cache(SLOTS, WINDOW)
    cache = jax.tree.map(lambda x: x + 7.0, cache)  # stale contents must not matter
    cache = self.insert(cache, kept, np.arange(len(slots)), slots)
    out = [np.asarray(logits)]
    for step in range(steps):
      positions = np.full(SLOTS, others, np.int32)
      positions[slots] = lengths + step
      fed = np.full(SLOTS, others, np.int32)
      fed[slots] = tokens[np.arange(len(slots)), lengths + step]
      ceiling = limit or positions.max() + 1
      logits, cache = self.decode(cache, fed, positions, np.int32(ceiling))
      out.append(np.asarray(logits)[slots])
    return np.stack(out)


@pytest.fixture(scope='module')
def decoder():
  return Decoder()


@pytest.fixture(scope='module')
def tokens():
  return small.tokens(3, 170)


@pytest.fixture(scope='module')
def plain(decoder, tokens):
  return decoder.run(tokens, np.array([0, 1, 2]), 20)


@pytest.mark.parametrize(
  'changes',
  [
    {},
    slow({'family': 'qwen2', 'qk_norm': False, 'attention_bias': True}),
    slow({'family': 'llama', 'qk_norm': False, 'rope_scaling': small.LLAMA3}),
  ],
)
def test_decode_equals_the_full_forward(changes, tokens):
  decoder = Decoder(**changes)
  out = decoder.run(tokens, np.array([3, 0, 4]), 20)
  ones = np.ones_like(tokens)
  hidden = jax.jit(decoder.model.hidden)(decoder.params, tokens, ones)
  full = np.asarray(decoder.model.logits(decoder.params, hidden))
  for row, length in enumerate(LENGTHS):
    expected = full[row, length - 1 : length + 20]
    np.testing.assert_allclose(out[:, row], expected, atol=2e-4)


@pytest.mark.optimized
def test_no_bit_depends_on_the_slot(decoder, tokens, plain):
  moved = decoder.run(tokens, np.array([4, 2, 0]), 20)
  np.testing.assert_array_equal(moved, plain)


@pytest.mark.optimized
def test_no_bit_depends_on_the_limit(decoder, tokens):
  lengths = np.array([5, 30, 90], np.int32)  # the second chunk is read at a far limit
  run = functools.partial(decoder.run, tokens, np.arange(3), 20, lengths=lengths)
  np.testing.assert_array_equal(run(limit=WINDOW), run())


@pytest.mark.optimized
def test_no_bit_depends_on_the_others(decoder, tokens, plain):
  others = tokens.copy()
  others[1:] = small.tokens(2, 170, seed=9)
  changed = decoder.run(others, np.array([0, 1, 2]), 20, others=66)
  np.testing.assert_array_equal(changed[:, 0], plain[:, 0])
  assert (changed[:, 1] != plain[:, 1]).any()


@pytest.mark.optimized
def test_no_bit_of_a_prefill_depends_on_row_or_company(decoder, tokens):
  def run(order, fill):
    rows = np.where(
      np.arange(WIDTH) < LENGTHS[order, None], tokens[order, :WIDTH], fill
    )
    return decoder.prefill(rows, LENGTHS[order])

  logits, kept = run(np.array([0, 1, 2]), fill=0)
  other_logits, other_kept = run(np.array([2, 0, 0]), fill=5)
  np.testing.assert_array_equal(other_logits[1], logits[0])
  np.testing.assert_array_equal(other_logits[0], logits[2])
  for name in ('k', 'v'):
    whole, other = np.asarray(kept[name]), np.asarray(other_kept[name])
    if name == 'k':
      whole, other = whole.swapaxes(-1, -2), other.swapaxes(-1, -2)
    real = slice(0, LENGTHS[0])
    np.testing.assert_array_equal(other[:, 1, :, real], whole[:, 0, :, real])


def filled_slots(cache):
  """Which slots hold anything, one set per array of the cache."""
  return [
    {slot for slot in range(SLOTS) if np.asarray(chunk)[slot].any()}
    for chunk in jax.tree.leaves(cache)
  ]


def test_one_prompt_fills_many_slots_and_padding_fills_none(decoder, tokens):
  _, kept = decoder.prefill(tokens[:, :WIDTH], LENGTHS)
  empty = decoder.model.init_cache(SLOTS, WINDOW)
  rows, slots = np.array([1, 1, 0, 2]), np.array([4, 2, SLOTS, -1])
  cache = jax.jit(kv_cache.insert)(empty, kept, rows, slots)
  assert filled_slots(cache) == [{2, 4}] * (6 * CHUNKS)  # keys and values, 3 layers
  for chunk in jax.tree.leaves(cache):
    np.testing.assert_array_equal(chunk[4], chunk[2])


@pytest.mark.parametrize('length', [50, 100, 140])
def test_a_slot_is_copied_as_far_as_it_reaches(decoder, tokens, length):
  _, kept = decoder.prefill(tokens[:, :WIDTH], LENGTHS)
  empty = decoder.model.init_cache(SLOTS, WINDOW)
  cache = decoder.insert(empty, kept, np.array([2]), np.array([3]))
  table = np.array([[3, 1, length], [1, 4, length], [3, 0, length]], np.int32)
  cache = jax.jit(kv_cache.copy, donate_argnums=0)(cache, table, 2)
  reached = -(-length // CHUNK)
  near, far = [{1, 3, 4}] * reached, [{3}] * (CHUNKS - reached)
  assert filled_slots(cache) == [*near, *far] * 6
  for i, chunk in enumerate(jax.tree.leaves(cache)):
    if i % CHUNKS < reached:
      np.testing.assert_array_equal(chunk[4], chunk[3])


def test_too_wide_a_prefill_is_refused(decoder, tokens):
  _, kept = decoder.prefill(tokens[:, :WIDTH], LENGTHS)
  with pytest.raises(ValueError, match='width 144 does not fit a cache of length 96'):
    kv_cache.insert(decoder.model.init_cache(1, 90), kept, *[np.zeros(1, int)] * 2)


def test_unstacked_parameters_give_the_same(decoder, tokens):
  apart = layer_stack.unstack(decoder.model.config, decoder.params)
  assert len(apart['layers']) == 3
  logits, kept = jax.jit(decoder.model.prefill)(apart, tokens[:, :WIDTH], LENGTHS)
  expected, expected_kept = decoder.prefill(tokens[:, :WIDTH], LENGTHS)
  np.testing.assert_allclose(logits, expected, atol=1e-4)
  assert kept['k'].shape == expected_kept['k'].shape
  zeros = np.zeros(SLOTS, np.int32)
  out, _ = jax.jit(decoder.model.decode)(
    apart, decoder.model.init_cache(SLOTS, WINDOW), zeros, zeros, np.int32(1)
  )
  cache = decoder.model.init_cache(SLOTS, WINDOW)
  np.testing.assert_allclose(
    out, decoder.decode(cache, zeros, zeros, np.int32(1))[0], atol=1e-4
  )


@pytest.mark.optimized
def test_the_cache_is_updated_in_place(decoder):
  cache = decoder.model.init_cache(SLOTS, WINDOW)

  def many(params, cache, tokens, positions):
    def step(_, state):
      cache, tokens, positions = state
      logits, cache = decoder.model.decode(
        params, cache, tokens, positions, positions.max() + 1
      )
      return cache, logits.argmax(-1).astype(jnp.int32), positions + 1

    return jax.lax.fori_loop(0, 4, step, (cache, tokens, positions))

  zeros = np.zeros(SLOTS, np.int32)
  program = jax.jit(many, donate_argnums=1)
  text = program.lower(decoder.params, cache, zeros, zeros).compile().as_text()
  for chunk in jax.tree.leaves(cache):
    shape = 'f32[' + ','.join(map(str, chunk.shape)) + ']'
    copies = [line for line in text.splitlines() if ' copy(' in line and shape in line]
    assert shape in text and not copies


def test_a_bfloat16_cache_follows_the_dtype():
  model, params = small.model_and_params()
  narrow = type(model)(model.config, dtype='bfloat16')
  cache = narrow.init_cache(2, 64)
  zeros = np.zeros(2, np.int32)
  logits, new = jax.jit(narrow.decode)(params, cache, zeros, zeros, np.int32(1))
  assert new['k'][0][0].dtype == jnp.bfloat16 and logits.dtype == jnp.float32
