"""Adapters that travel beside their base: merged where they arrive, as at home."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models import huggingface, lora
from jaxrl.models.transformer_lm import TransformerLM
from tests.marks import slow
from tests.models import small

DTYPES = [
  ('float32', 'float32'),
  slow('bfloat16', 'float32'),
  slow('bfloat16', 'bfloat16'),
]


DENSE, EVERY = 'q,o,down', small.TARGETS


def moved(base, targets=DENSE):
  """A model with adapters, none of them zero."""
  adapters = lora.lora_adapters(
    rank=3, alpha=5.0, targets=targets, base=base, send='adapters'
  )
  changes = small.EXPERTS if targets == EVERY else {}
  model = TransformerLM(small.config(lora=adapters, **changes))
  params = lora.to_storage_dtype(model.config, model.init(jax.random.key(1)))
  rng = np.random.default_rng(2)

  def fill(path, x):
    b = path[-1].key == 'lora_b'
    return jnp.float32(rng.normal(size=x.shape)) if b else x

  return model, jax.tree_util.tree_map_with_path(fill, params)


@pytest.mark.parametrize(('base', 'dtype'), DTYPES)
def test_they_are_merged_as_the_learner_merges(base, dtype):
  model, params = moved(base, EVERY)
  transfer = lora.make_transfer(model.config, params)
  assert lora.is_transfer(transfer) and not lora.is_transfer(params)
  merged_params = jax.jit(lora.merge_transfer, static_argnums=1)(transfer, dtype)
  wanted = jax.jit(lora.merged, static_argnums=(0, 2))(model.config, params, dtype)
  assert jax.tree.structure(merged_params) == jax.tree.structure(wanted)
  jax.tree.map(np.testing.assert_array_equal, merged_params, wanted)
  merged = wanted['layers']['mlp']['experts']['down']['kernel'], wanted['lm_head']
  for x in (merged[0], merged[1]['table']):
    assert x.dtype == jnp.promote_types(base, dtype)


@pytest.mark.parametrize('targets', [DENSE, EVERY])
@pytest.mark.parametrize('base', ['float32', slow('bfloat16')])
def test_on_the_host_a_layer_is_merged_when_it_is_looked_at(base, targets):
  model, params = moved(base, targets)
  transfer = jax.tree.map(np.asarray, lora.make_transfer(model.config, params))
  merged = lora.merged(model.config, params)
  shape = lora.base_config(model.config)
  exported = dict(huggingface.export(shape, lora.merge_transfer_on_host(transfer)))
  wanted = dict(huggingface.export(shape, jax.tree.map(np.asarray, merged)))
  assert exported.keys() == wanted.keys()
  for name, array in wanted.items():
    np.testing.assert_allclose(
      np.float32(exported[name]), np.float32(array), rtol=1e-5, atol=1e-6, err_msg=name
    )
  q = 'model.layers.1.self_attn.q_proj.weight'
  plain = dict(
    huggingface.export(shape, jax.tree.map(np.asarray, lora.without(params)))
  )
  assert np.abs(exported[q] - np.float32(plain[q])).max() > 0.01
