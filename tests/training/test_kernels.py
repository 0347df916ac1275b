"""`--config.kernels=reference` takes no kernel, for whatever a program is compiled."""

import logging

import jax
import jax.numpy as jnp
import pytest

from configs import base
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.transformer_lm import TransformerLM
from kernels import dispatch
from launch.settings.resolve import resolve_settings

SHAPE = ModelConfig(64, 32, 1, 2, 1, 128, 32)
TOKENS = jax.ShapeDtypeStruct((2, 128), jnp.int32)


def programs(kernels, platform):
  """What a train step and a decode step trace to."""
  config = base.get_config()
  config.kernels, config.model.dtype = kernels, 'bfloat16'
  model = TransformerLM(
    SHAPE, **resolve_settings(config).compute_options, platform=platform
  )
  params = jax.eval_shape(model.init, jax.random.key(0))

  def loss(params, tokens, segment_ids):
    out = model.policy_outputs(params, tokens, segment_ids, entropy=True)
    return out.logprobs.sum() + out.entropy.sum()

  cache = jax.eval_shape(lambda: model.init_cache(2, 128))
  slots, limit = jnp.zeros(2, jnp.int32), jnp.int32(1)
  train = jax.make_jaxpr(jax.grad(loss))(params, TOKENS, TOKENS)
  decode = jax.make_jaxpr(model.decode)(params, cache, slots, slots, limit)
  return str(train), str(decode)


@pytest.mark.parametrize('platform', ['tpu', 'gpu'])
def test_kernels_are_turned_off(platform, caplog):
  dispatch._log_choice.cache_clear()
  with caplog.at_level(logging.INFO, 'kernels'):
    train, decode = programs('auto', platform)
    chosen = dict(record.message.split(': ')[:2] for record in caplog.records)
    kernel = chosen[f'token_logprobs on {platform}'].split()[0]
    assert kernel == {'tpu': 'mosaic', 'gpu': 'kept'}[platform]
    if platform == 'tpu':  # forward and backward, of attention and of log-probs
      assert train.count('pallas_call') >= 4 and 'pallas_call' in decode
    else:  # which JAX would lower through Triton
      assert 'pallas_call' not in train + decode
    caplog.clear()
    train, decode = programs('reference', platform)
  assert 'pallas_call' not in train + decode
  assert 'cudnn' not in train + decode
  messages = sorted(record.message for record in caplog.records)
  assert messages == [
    f'{what} on {platform}: reference (asked for)'
    for what in ('attention', 'decode attention', 'token_logprobs')
  ]
