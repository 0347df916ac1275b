"""Rows cut over the context axis make the same step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.training.parallelism.mesh import MeshOptions, make_mesh
from jaxrl.training.parallelism.model_sharding import on_mesh
from tests.marks import extended, slow
from tests.training import toy
from tests.training.test_invariance import assert_same

MESHES = {
  'two': {'data': 2, 'fsdp': 2, 'context': 2},
  'four': {'fsdp': 2, 'context': 4},
}


@pytest.mark.slow
@pytest.mark.parametrize(
  'name, mesh', [('grpo', 'four'), extended('ppo', 'two'), extended('dpo', 'four')]
)
async def test_cutting_rows_changes_nothing(name, mesh):
  await assert_same(
    name, TransformerLM, {}, {'mesh': MESHES[mesh], 'length_buckets': (18,)}
  )


def packed(length, kv_heads):
  """A model of 3 query heads to a key head, and rows of segments with a prefix."""
  changes = {'num_heads': 3 * kv_heads, 'num_kv_heads': kv_heads, 'value_head': True}
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 64, (4, length)).astype(np.int32)
  segment_ids = np.sort(rng.integers(1, 4, (4, length))).astype(np.int32)
  segment_ids[:, -2:] = 0
  prefix_ids = np.where(segment_ids == 3, 1, 0).astype(np.int32)
  return changes, tokens, segment_ids, prefix_ids


@pytest.mark.parametrize('mesh', [slow('two'), 'four'])
def test_packed_rows_of_any_length_and_heads(mesh):
  changes, tokens, segment_ids, prefix_ids = packed(length=19, kv_heads=1)
  plain, params = toy.model(**changes), toy.params(**changes)
  rng = np.random.default_rng(1)
  weights = jnp.asarray(rng.normal(size=(3, 4, 19)), jnp.float32)

  @functools.partial(jax.jit, static_argnums=0)
  def run(model, params, tokens):
    def loss(params):
      out = model.policy_outputs(
        params,
        tokens,
        segment_ids,
        prefix_ids=prefix_ids,
        entropy=True,
        topk_ids=jnp.stack([tokens, (tokens + 1) % 64], -1),
      )
      parts = jnp.stack([out.logprobs, out.entropy, out.values])
      return (weights * parts).sum() + out.topk_logprobs.sum(), out

    return jax.value_and_grad(loss, has_aux=True)(params)

  one = run(plain, params, tokens)
  two = run(on_mesh(plain, make_mesh(MeshOptions(**MESHES[mesh]))), params, tokens)
  same = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)
  jax.tree.map(same, one, two)
