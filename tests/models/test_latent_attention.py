"""Latent attention over a cache is that over the keys and values of its latents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl.component_calls import ComponentCall
from jaxrl.model_loading import random_config
from jaxrl.models import lora, rope
from jaxrl.models.mixers import latent_attention


def make_attention(targets):
  family = ComponentCall('deepseek_v3')
  config = random_config(family=family, hidden_size=32, num_layers=1, vocab_size=8)
  adapters = lora.lora_adapters(rank=2, alpha=3.0, targets=targets) if targets else None
  config = config.replace(lora=adapters)
  draw = np.random.default_rng(0)
  module = latent_attention.LatentAttention(config, nnx.Rngs(params=jax.random.key(0)))
  graph, state = nnx.split(module)
  moved = jax.tree.map(
    lambda x: np.float32(x + 0.3 * draw.standard_normal(x.shape)), jax.device_get(state)
  )
  return nnx.merge(graph, moved), config


@pytest.mark.parametrize('targets', ['', 'q,k,v,o', 'q_a,kv_b'])
def test_queries_of_latents_give_the_same_scores_and_outputs(targets):
  attention, config = make_attention(targets)
  x = np.random.default_rng(1).standard_normal((5, 32)).astype(np.float32)
  rotation = rope.rotation(config, jnp.arange(5))
  weights = np.random.default_rng(2).random((4, 5, 5)).astype(np.float32)

  @nnx.jit
  def attend(attention, x, weights):
    (q, kept, none), _ = attention.project(x, *rotation)
    assert none is None and kept.shape == (5, 1, 32 + 16)
    mixed = jnp.einsum('hts,sr->thr', weights, kept[:, 0])
    return (
      q,
      kept,
      attention.expand(kept),
      attention.absorb(q),
      attention.release(mixed),
    )

  q, kept, (k, v), absorbed, released = attend(attention, x, weights)
  wanted = np.einsum('thd,shd->hts', q, k)
  scores = np.einsum('thr,sr->hts', absorbed, np.asarray(kept)[:, 0])
  np.testing.assert_allclose(scores, wanted, rtol=1e-4, atol=1e-4)
  wanted = np.einsum('hts,shd->thd', weights, v)
  np.testing.assert_allclose(released, wanted, rtol=1e-4, atol=1e-4)
  names = 'q_a', 'q_b', 'kv_a', 'kv_b', 'o'
  adapted = {name for name in names if hasattr(getattr(attention, name), 'lora_a')}
  whole = set(names) if targets == 'q,k,v,o' else set(targets.split(',')) - {''}
  assert adapted == whole


def test_neighbours_are_rotated_as_halves_are():
  """As (x₀, x₁), (x₂, x₃) … of which the first and the second ones come together."""
  x = np.random.default_rng(0).standard_normal((3, 2, 8)).astype(np.float32)
  angles = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
  apart = np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
  wanted = rope.rotate(jnp.asarray(apart), np.cos(angles), np.sin(angles))
  rotated = rope.rotate(
    jnp.asarray(x), np.cos(angles), np.sin(angles), interleaved=True
  )
  np.testing.assert_array_equal(rotated, wanted)


def test_adapters_of_latents_need_latents():
  adapters = lora.lora_adapters(targets='q,kv_a')
  with pytest.raises(ValueError, match="targets='kv_a' needs a model with latent"):
    random_config(family=ComponentCall('qwen3')).replace(lora=adapters)
