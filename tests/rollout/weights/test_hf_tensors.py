"""Tensors of a checkpoint, gathered one at a time from the devices of a learner."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.model_loading import random_config
from jaxrl.models import huggingface
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.weights.direct_transfer import gather_hf_tensors, hf_tensors_bytes
from jaxrl.training.parallelism.mesh import MeshOptions, make_mesh
from tests.calls import parse_call


@pytest.fixture(
  scope='module', params=['qwen2', 'qwen3', 'llama(tie_embeddings=False)']
)
def policy(request):
  shape = random_config(
    family=parse_call(request.param),
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    intermediate_size=64,
  )
  return shape, TransformerLM(shape).init(jax.random.key(0))


def test_they_are_what_a_checkpoint_holds(policy):
  shape, params = policy
  wanted = dict(huggingface.export(shape, jax.tree.map(np.asarray, params)))
  tensors = {tensor.name: array for tensor, array in gather_hf_tensors(shape, params)}
  assert list(tensors) == list(wanted)
  for name, array in tensors.items():
    np.testing.assert_array_equal(array, wanted[name])
  assert hf_tensors_bytes(shape, params) == sum(x.nbytes for x in wanted.values())


def test_each_device_of_a_mesh_has_them_whole_and_cast(policy):
  shape, params = policy
  mesh = make_mesh(MeshOptions(data=1, fsdp=2, tensor=2), devices=jax.devices()[:4])
  whole_everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

  def split(leaf):  # along the last axis that four devices can share
    axes = [None] * leaf.ndim
    even = [axis for axis, size in enumerate(leaf.shape) if size % 4 == 0]
    axes[even[-1]] = ('fsdp', 'tensor')
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    return jax.device_put(leaf, sharding)

  shared = jax.tree.map(split, params)
  tensors = dict(gather_hf_tensors(shape, shared, 'bfloat16'))
  assert {array.sharding for array in tensors.values()} == {whole_everywhere}
  for tensor, alone in gather_hf_tensors(shape, params):
    (array,) = (a for t, a in tensors.items() if t == tensor)
    assert array.dtype == jnp.bfloat16 and len(array.addressable_shards) == 4
    for shard in array.addressable_shards:
      np.testing.assert_array_equal(shard.data, alone.astype(jnp.bfloat16))
  assert hf_tensors_bytes(shape, shared, 'bfloat16') * 2 == hf_tensors_bytes(
    shape, params
  )


def test_what_rests_with_the_host_is_brought_to_its_device(policy):
  shape, params = policy
  away = params['norm']['scale'].sharding.with_memory_kind('pinned_host')
  resting = jax.tree.map(lambda x: jax.device_put(x, away), params)
  pairs = zip(
    gather_hf_tensors(shape, resting), gather_hf_tensors(shape, params), strict=True
  )
  for (tensor, array), (_, wanted) in pairs:
    assert array.sharding.memory_kind != 'pinned_host', tensor
    np.testing.assert_array_equal(array, wanted)
