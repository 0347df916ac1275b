"""Decode from pages: equal to the full forward, and bitwise independent of company."""

import jax
import numpy as np
import pytest

from jaxrl.device_thread import DeviceThread
from jaxrl.models import kv_cache, transformer_lm
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.engine.jax_engine import JaxEngine
from jaxrl.types import SamplingParams
from kernels import paged_attention
from tests.marks import slow
from tests.models import small

SLOTS, WINDOW, WIDTH = 4, 192, 144
LENGTHS = np.array([120, 5, 144], np.int32)


@pytest.fixture(autouse=True)
def pages(monkeypatch):
  """Decode takes the cache of a TPU, with plain jnp in place of its kernel.

  The kernel itself, which takes no head as narrow as these, is compared with it in
  `tests.kernels.test_paged_attention`.
  """
  for module in (paged_attention, transformer_lm):
    monkeypatch.setattr(module, 'platform_of', lambda platform: 'tpu')
  candidates = {'mosaic': paged_attention.reference}
  monkeypatch.setattr(paged_attention, '_candidates', lambda *_: candidates)
  monkeypatch.setattr(paged_attention, 'mosaic', paged_attention.reference)


def run(model, params, tokens, slots, steps=10, limit=None, others=0):
  """Prefills rows, then feeds their next tokens; returns `[steps, rows, V]`."""
  _, kept = jax.jit(model.prefill)(params, tokens[:, :WIDTH], LENGTHS)
  cache = jax.tree.map(lambda x: x + 7, model.init_cache(SLOTS, WINDOW))
  cache = jax.jit(kv_cache.insert)(cache, kept, np.arange(len(slots)), slots)
  decode, out = jax.jit(model.decode), []
  for step in range(steps):
    positions = np.full(SLOTS, others, np.int32)
    positions[slots] = LENGTHS + step
    fed = np.full(SLOTS, others, np.int32)
    fed[slots] = tokens[np.arange(len(slots)), LENGTHS + step]
    ceiling = np.int32(limit or positions.max() + 1)
    logits, cache = decode(params, cache, fed, positions, ceiling)
    out.append(np.asarray(logits)[slots])
  return np.stack(out)


@pytest.mark.parametrize(
  'dtype, bound',
  [('float32', 2e-4), slow('bfloat16', 0.4)],
)
def test_decode_equals_the_full_forward(dtype, bound):
  model, params = small.model_and_params()
  tokens = small.tokens(3, 160)
  typed_model = TransformerLM(model.config, dtype=dtype)
  assert set(typed_model.init_cache(1, 8)) == {'k_pages', 'v_pages'}
  out = run(typed_model, params, tokens, np.array([3, 0, 2]))
  plain = TransformerLM(model.config, kernels='reference')
  hidden = jax.jit(plain.hidden)(params, tokens, np.ones_like(tokens))
  full = np.asarray(plain.logits(params, hidden))
  for row, length in enumerate(LENGTHS):
    expected = full[row, length : length + 10]
    np.testing.assert_allclose(out[:, row], expected, atol=bound)


@pytest.mark.slow
def test_no_bit_depends_on_slot_limit_or_others():
  model, params = small.model_and_params()
  tokens = small.tokens(3, 160)
  one = run(model, params, tokens, np.array([0, 1, 2]), 3)
  far = run(model, params, tokens, np.array([3, 1, 0]), 3, limit=WINDOW, others=66)
  np.testing.assert_array_equal(one, far)


def test_a_slot_is_copied_as_far_as_it_reaches():
  model, _ = small.model_and_params()
  empty = model.init_cache(SLOTS, 300)
  cache = jax.tree.map(lambda x: x.at[:, 3].set(1), empty)
  table = np.array([[3, 1, 129], [1, 2, 128], [0, 0, 0]], np.int32)
  cache = jax.jit(kv_cache.copy)(cache, table, 2)
  for pages in jax.tree.leaves(cache):
    filled = np.asarray(pages)[0, :, :, 0].sum(-1)
    np.testing.assert_array_equal(filled, [0, 256, 128, 384])


@pytest.mark.slow
async def test_the_engine_decodes_from_pages():
  model, params = small.model_and_params()
  prompt = small.tokens(20).tolist()
  replies = []
  for kernels in ('auto', 'reference'):
    device_thread = DeviceThread()
    engine = JaxEngine(
      TransformerLM(model.config, kernels=kernels),
      device_thread=device_thread,
      max_num_seqs=2,
      max_length=64,
      decode_steps=4,
      prompt_buckets=[32],
    )
    await engine.load(0, params)
    sampling = SamplingParams(max_tokens=6, temperature=0.0)
    replies.append(await engine.generate('one', prompt, sampling))
    assert engine._state is not None
    cache = engine._state[0]
    assert set(cache) == (
      {'k', 'v'} if kernels == 'reference' else {'k_pages', 'v_pages'}
    )
    device_thread.close()
  paged_one, plain = replies
  np.testing.assert_array_equal(paged_one.tokens, plain.tokens)
  np.testing.assert_allclose(paged_one.logprobs, plain.logprobs, atol=1e-4)
