"""Layers with matrices in 8 bits compute what layers with rounded matrices do."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.component_calls import ComponentCall
from jaxrl.model_loading import random_config
from jaxrl.models import kv_cache, layer_stack
from jaxrl.models.decoding import eight_bit_weights, joined_products
from jaxrl.models.transformer_lm import TransformerLM
from kernels import block_rounding
from kernels.block_rounding import BlockFormat
from tests.marks import slow
from tests.models import small

INT8, FLOAT8 = BlockFormat('int8', 10), BlockFormat('float8_e4m3fn', 10)
BIASES = {'family': 'qwen2', 'qk_norm': False, 'attention_bias': True}
FAMILIES = [(BIASES, 7), slow(small.EXPERTS, 7)]


def rounded_params(params, form):
  """Rounds kernels by their names, one layer after the other."""
  inputs = {'o': 2}

  def change(path, x):
    names = [key.key for key in path]
    kept = {'router', 'shared_gate'} & set(names)
    if names[0] != 'layers' or names[-1] != 'kernel' or kept:
      return x
    lead = 2 if 'experts' in names else 1
    width = np.prod(x.shape[lead : lead + inputs.get(names[-2], 1)])
    matrix = x.reshape(*x.shape[:lead], int(width), -1)
    return block_rounding.decode(*block_rounding.encode(matrix, form)).reshape(x.shape)

  return jax.tree_util.tree_map_with_path(change, params)


def prefill_and_decode(model, weights):
  tokens, lengths = small.tokens(2, 12), np.array([12, 5], np.int32)
  logits, kept = jax.jit(model.prefill)(weights, tokens, lengths)
  slots = np.arange(2, dtype=np.int32)
  cache = kv_cache.insert(model.init_cache(2, 32), kept, slots, slots)
  inputs = cache, tokens[:, 0], lengths, np.int32(13)
  return logits, jax.jit(model.decode)(weights, *inputs)[0]


@pytest.mark.parametrize('form', [INT8, FLOAT8], ids=str)
@pytest.mark.parametrize('changes, number', FAMILIES)
def test_decode_is_that_of_rounded_matrices(changes, number, form):
  model, params = small.model_and_params(**changes)
  expected = prefill_and_decode(model, rounded_params(params, form))
  encoded = eight_bit_weights.encode(layer_stack.unstack(model.config, params), form)
  layer = encoded['layers'][0]
  codes = [x for x in jax.tree.leaves(layer) if x.dtype == form.dtype]
  assert len(codes) == number
  plain = prefill_and_decode(model, params)
  for a, b, c in zip(prefill_and_decode(model, encoded), expected, plain, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert np.abs(a - c).max() > 1e-3
  joined = joined_products.join(encoded)
  assert 'codes' in joined['layers'][0]['attention']['qkv']
  for a, b in zip(prefill_and_decode(model, joined), expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_latents_are_expanded_by_rounded_matrices():
  family = ComponentCall('deepseek_v3')
  shape = random_config(family=family, hidden_size=32, num_layers=2, vocab_size=67)
  model = TransformerLM(shape)
  params = jax.tree.map(lambda x: 3 * x, model.init(jax.random.key(1)))
  encoded = eight_bit_weights.encode(layer_stack.unstack(model.config, params), INT8)
  attention = encoded['layers'][0]['attention']
  assert all('codes' in attention[name] for name in ('kv_a', 'kv_b', 'o'))
  expected = prefill_and_decode(model, rounded_params(params, INT8))
  for a, b in zip(prefill_and_decode(model, encoded), expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('form', [INT8, FLOAT8], ids=str)
@pytest.mark.parametrize('changes', [BIASES, slow(small.EXPERTS)])
def test_what_is_sent_is_what_an_engine_makes_itself(changes, form):
  model, params = small.model_and_params(**changes)
  sent = eight_bit_weights.to_send(params, form)
  names = {x.dtype.name for x in eight_bit_weights.parts(sent)}
  assert names == {'int8' if form == INT8 else 'uint8', 'bfloat16'}
  arrived = eight_bit_weights.encode(layer_stack.unstack(model.config, sent), form)
  here = eight_bit_weights.encode(layer_stack.unstack(model.config, params), form)
  jax.tree.map(np.testing.assert_array_equal, arrived, here)
  assert {x.dtype.name for x in eight_bit_weights.parts(here)} == {
    form.dtype,
    'bfloat16',
  }
  kept = {name: x for name, x in here.items() if name != 'layers'}
  jax.tree.map(np.testing.assert_array_equal, kept, {n: params[n] for n in kept})


@pytest.mark.parametrize('remat', ['none', 'full'])
@pytest.mark.parametrize('changes', [BIASES, slow(small.EXPERTS)])
def test_the_learner_rounds_and_its_gradient_passes(changes, remat):
  model, params = small.model_and_params(**changes)
  model = dataclasses.replace(model, remat=remat)
  tokens = small.tokens(2, 12)

  @functools.partial(jax.jit, static_argnums=0)
  def loss(model, params):
    logprobs = model.policy_outputs(params, tokens, np.ones_like(tokens)).logprobs
    return logprobs.sum(), logprobs

  grad = jax.jit(jax.grad(loss, argnums=1, has_aux=True), static_argnums=0)
  rounding = dataclasses.replace(model, rounding=INT8)
  gradient, logprobs = grad(rounding, params)
  expected_gradient, expected = grad(model, rounded_params(params, INT8))
  np.testing.assert_allclose(logprobs, expected, rtol=1e-6, atol=1e-6)
  assert np.abs(logprobs - loss(model, params)[1]).max() > 1e-3
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
    gradient,
    expected_gradient,
  )


def test_bytes_are_a_quarter_and_the_scales():
  _, params = small.model_and_params(hidden_size=32)
  encoded = eight_bit_weights.to_send(params, BlockFormat('int8', 16))
  matrices = [
    x
    for path, x in jax.tree_util.tree_leaves_with_path(params['layers'])
    if path[-1].key == 'kernel'
  ]
  elements = sum(x.size for x in matrices)
  blocks = 3 * (32 // 16 * (64 + 32 + 32 + 40 + 40) + (64 // 16 + 3) * 32)
  assert (
    sum(x.nbytes for x in eight_bit_weights.parts(encoded)) == elements + 2 * blocks
  )
  assert jax.tree.leaves(encoded)[0].dtype == jnp.float32
