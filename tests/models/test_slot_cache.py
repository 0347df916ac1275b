"""The cache of cuDNN's decode: equal to the full forward, whatever else it holds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models import kv_cache, transformer_lm
from jaxrl.models.decoding import slot_cache
from kernels import cudnn_attention
from kernels.paged_attention import reference
from tests.models import small
from tests.models.test_paged_cache import LENGTHS, SLOTS, run


@pytest.fixture
def gpu(monkeypatch):
  """Programs are those of a GPU; XLA computes what cuDNN would."""
  decode = functools.partial(cudnn_attention.decode, implementation='xla')
  monkeypatch.setattr(cudnn_attention, 'decode', decode)
  monkeypatch.setattr(cudnn_attention, 'decode_obstacle', lambda *shape: '')
  monkeypatch.setattr(transformer_lm, 'platform_of', lambda platform: 'gpu')
  monkeypatch.setattr('jaxrl.models.kv_cache.platform_of', lambda platform: 'gpu')


def test_decode_equals_the_full_forward(gpu):
  model, params = small.model_and_params()
  tokens = small.tokens(3, 160)
  assert set(model.init_cache(1, 8)) == {'k_slots', 'v_slots'}
  out = run(model, params, tokens, np.array([3, 0, 2]))
  far = run(model, params, tokens, np.array([3, 1, 0]), 3, others=66)
  np.testing.assert_array_equal(out[:3], far)
  hidden = jax.jit(model.hidden)(params, tokens, np.ones_like(tokens))
  full = np.asarray(model.logits(params, hidden))
  for row, length in enumerate(LENGTHS):
    expected = full[row, length : length + 10]
    np.testing.assert_allclose(out[:, row], expected, atol=2e-4)


def test_a_slot_is_copied_as_far_as_it_reaches(gpu):
  model, _ = small.model_and_params()
  cache = model.init_cache(SLOTS, 300)
  cache = jax.tree.map(lambda x: x.at[3].set(1), cache)
  table = np.array([[3, 1, 129], [1, 2, 64], [0, 0, 0]], np.int32)
  cache = jax.jit(kv_cache.copy)(cache, table, 2)
  for kept in jax.tree.leaves(cache):
    filled = np.asarray(kept)[:, :, 0, 0].sum(-1)
    np.testing.assert_array_equal(filled, [0, 192, 64, 320])


def test_queries_attend_to_the_positions_that_count():
  keys = jax.random.split(jax.random.key(0), 3)
  q = jax.random.normal(keys[0], (3, 4, 16))
  k, v = (jax.random.normal(key, (3, 64, 2, 16)) for key in keys[1:])
  lengths = jnp.array([1, 40, 64], jnp.int32)
  out = cudnn_attention.decode(q, k, v, lengths, implementation='xla')
  pages = (x.transpose(2, 0, 1, 3) for x in (k, v))
  np.testing.assert_allclose(out, reference(q, *pages, lengths), atol=1e-5)


def test_who_does_not_use_it_is_told_why():
  config = small.config()
  options = {'kernels': 'auto', 'platform': 'gpu'}
  assert 'float32' in slot_cache.obstacle(config, 'float32', **options)
  assert 'gpu' in slot_cache.obstacle(
    config, 'bfloat16', kernels='auto', platform='tpu'
  )
  refused = slot_cache.obstacle(config, 'bfloat16', kernels='reference', platform='gpu')
  assert refused == 'not asked for'
