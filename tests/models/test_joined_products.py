"""Joined matrices compute what the single ones do, and leave adapters alone."""

import jax
import numpy as np
import pytest

from jaxrl.models.decoding import joined_products
from jaxrl.models.lora import lora_adapters
from tests.marks import slow
from tests.models import small


@pytest.mark.parametrize(
  'changes, joined',
  [
    ({'family': 'qwen2', 'qk_norm': False, 'attention_bias': True}, {'qkv', 'gate_up'}),
    slow(small.EXPERTS, {'qkv'}),
  ],
)
def test_prefill_and_decode_are_the_same(changes, joined):
  model, params = small.model_and_params(**changes)
  apart = model.unstack(params)
  one = joined_products.join(apart)
  layer = one['layers'][0]
  assert {*layer['attention'], *layer['mlp']} & {'qkv', 'gate_up'} == joined
  assert not {'q', 'k', 'v'} & layer['attention'].keys()
  sizes = [sum(x.size for x in jax.tree.leaves(tree)) for tree in (apart, one)]
  assert sizes[0] == sizes[1]
  tokens, lengths = small.tokens(2, 12), np.array([12, 5], np.int32)
  results = []
  for weights in (apart, one):
    logits, kept = jax.jit(model.prefill)(weights, tokens, lengths)
    slots = np.arange(2, dtype=np.int32)
    cache = model.insert(model.init_cache(2, 32), kept, slots, slots)
    inputs = cache, tokens[:, 0], lengths, np.int32(13)
    results.append((logits, jax.jit(model.decode)(weights, *inputs)[0]))
  for a, b in zip(*results, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_adapters_stay_apart():
  lora = lora_adapters(rank=2, alpha=4.0, targets='k,up')
  model, params = small.model_and_params(lora=lora)
  apart = model.unstack(params)
  assert jax.tree.structure(joined_products.join(apart)) == jax.tree.structure(apart)
