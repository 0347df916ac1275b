"""Adapters in the model: the same forward pass as merged, and PEFT's names."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl.models import hf_names, lora, peft_export
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.options import ConfigError
from tests.calls import parse_lora
from tests.models import small

DENSE = {'lora': lora.lora_adapters(rank=3, alpha=6.0)}
EXPERTS = small.EXPERTS | {
  'lora': lora.lora_adapters(rank=3, alpha=6.0, targets=small.TARGETS)
}


@pytest.fixture(scope='module', params=[DENSE, EXPERTS], ids=['dense', 'experts'])
def adapted(request):
  """A model with adapters everywhere, none of them zero, and the bare one."""
  bare, params = small.model_and_params(**request.param | {'lora': None})
  model = TransformerLM(small.config(**request.param))
  params = lora.add_adapters(model, params, jax.random.key(1))
  rng = np.random.default_rng(2)

  def fill(path, x):
    return 0.2 * rng.normal(size=x.shape) if path[-1].key == 'lora_b' else x

  moved = jax.tree_util.tree_map_with_path(fill, params)
  return bare, model, params, jax.tree.map(np.float32, moved)


def logprobs(model, params):
  tokens = jnp.asarray(small.tokens(2, 8))
  score = jax.jit(model.policy_outputs)
  return np.asarray(score(params, tokens, jnp.ones_like(tokens)).logprobs)


def test_fresh_adapters_change_no_bit(adapted):
  bare, model, params, moved = adapted
  base = logprobs(bare, lora.without(params))
  np.testing.assert_array_equal(logprobs(model, params), base)
  assert np.abs(logprobs(model, moved) - base).max() > 0.1
  again = lora.add_adapters(model, moved, jax.random.key(5))
  assert jax.tree.all(jax.tree.map(lambda x, y: x is y, again, moved))


def test_merged_weights_say_the_same(adapted):
  bare, model, _, moved = adapted
  merged = lora.merged(model.config, moved)
  assert jax.tree.structure(merged) == jax.tree.structure(lora.without(moved))
  merged_logprobs = logprobs(bare, merged)
  np.testing.assert_allclose(
    logprobs(model, moved), merged_logprobs, rtol=1e-5, atol=1e-5
  )
  o = moved['layers']['attention']['o']  # whose inputs are two axes
  want = o['kernel'] + 2 * np.einsum('lhdr,lre->lhde', o['lora_a'], o['lora_b'])
  got = merged['layers']['attention']['o']['kernel']
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_what_learns_comes_apart_and_together():
  adapters = lora.lora_adapters(rank=2, targets='q, down')
  model, params = small.model_and_params(lora=adapters, value_head=True)
  part = lora.trainable_params(model.config, params)
  assert set(part) == {'layers', 'value_head'}
  assert set(part['layers']) == {'attention', 'mlp'}
  assert set(part['layers']['attention']) == {'q'}
  assert set(part['layers']['mlp']['down']) == {'lora_a', 'lora_b'}
  assert part['layers']['attention']['q']['lora_a'].shape == (3, 24, 2)
  assert part['layers']['attention']['q']['lora_b'].shape == (3, 2, 4, 16)
  doubled = jax.tree.map(lambda x: x + 1, part)
  whole = lora.merge_trainable(model.config, params, doubled)
  assert jax.tree.structure(whole) == jax.tree.structure(params)
  assert (
    whole['layers']['mlp']['up']['kernel'] is params['layers']['mlp']['up']['kernel']
  )
  assert whole['value_head']['bias'] == params['value_head']['bias'] + 1
  axes = model.logical_axes()['layers']['attention']['q']
  assert axes['lora_a'] == ('layers', 'embed', None)
  assert axes['lora_b'] == ('layers', None, 'heads', None)


def test_a_base_in_bfloat16_is_merged_in_float32():
  config = small.config(lora=lora.lora_adapters(rank=2, base='bfloat16'))
  shapes = jax.eval_shape(TransformerLM(config).init, jax.random.key(0))
  q = shapes['layers']['attention']['q']
  assert (q['kernel'].dtype, q['lora_a'].dtype) == ('bfloat16', 'float32')
  assert shapes['embedding']['table'].dtype == 'bfloat16'
  assert shapes['norm']['scale'].dtype == 'float32'
  for dtype in ('float32', 'bfloat16'):
    merged = jax.eval_shape(lambda x, d=dtype: lora.merged(config, x, d), shapes)
    assert merged['layers']['attention']['q']['kernel'].dtype == dtype


def test_a_merged_router_stays_in_the_type_that_it_scores_in():
  """Rounded as its base is, it would send some tokens to other experts."""
  chosen = lora.lora_adapters(rank=2, base='bfloat16', targets='q,router')
  model = TransformerLM(small.config(**small.EXPERTS, lora=chosen), dtype='bfloat16')
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  merged = jax.eval_shape(lambda x: lora.merged(model.config, x, 'bfloat16'), shapes)
  assert merged['layers']['attention']['q']['kernel'].dtype == 'bfloat16'
  assert merged['layers']['mlp']['router']['kernel'].dtype == 'float32'


def test_the_folder_is_pefts(adapted, tmp_path):
  """Merged from the files alone, by PEFT's rule, the weights are those we merge."""
  _, model, _, moved = adapted
  peft_export.save_peft(tmp_path, model.config, moved, 'base-model')
  settings = json.loads((tmp_path / 'adapter_config.json').read_text())
  assert (settings['r'], settings['lora_alpha']) == (3, 6)
  assert settings['base_model_name_or_path'] == 'base-model'
  arrays = load_file(tmp_path / 'adapter_model.safetensors')
  # A and B of each layer's: four of attention and three a feed-forward part.
  experts = model.config.num_experts
  assert len(arrays) == 2 * (3 * (4 + 1 + 3 * 4) + 1 if experts else 3 * 7)
  merged = lora.merged(model.config, moved)
  for tensor in hf_names.checkpoint_tensors(lora.base_config(model.config)):
    module = tensor.name.removesuffix('.weight')
    if module.rsplit('.', 1)[-1] not in settings['target_modules']:
      continue
    a = arrays.pop(f'base_model.model.{module}.lora_A.weight')
    b = arrays.pop(f'base_model.model.{module}.lora_B.weight')

    def fetch(tree, tensor=tensor):
      for key in tensor.path:
        tree = tree[key]
      return tensor.to_hf(np.asarray(tree[tensor.index]))

    want = fetch(moved) + 2 * b @ a
    np.testing.assert_allclose(fetch(merged), want, rtol=1e-5, atol=1e-6)
  assert not arrays


@pytest.mark.parametrize(
  'text, message',
  [
    ('lora(targets="q,kv")', "no linear layer 'kv'. Did you mean 'v'"),
    ('lora(rank=0)', 'rank=0 and alpha=32.0 must be above 0'),
    ('lora(r=4)', "no option 'r'"),
    ('dora', "no kind of adapter 'dora'. Did you mean 'lora'"),
    ('lora(base="int8")', 'one of float32, bfloat16'),
  ],
)
def test_wrong_adapters_say_what_is_right(text, message):
  with pytest.raises(ConfigError, match=re.escape(message)):
    parse_lora(text)
  assert parse_lora('') is None


def test_what_a_model_has_not_has_no_adapters():
  with pytest.raises(ValueError, match="'router' needs a model with experts"):
    small.config(lora=lora.lora_adapters(targets='q,router'))
  with pytest.raises(ValueError, match="'lm_head' has no effect"):
    small.config(lora=lora.lora_adapters(targets='lm_head'))
