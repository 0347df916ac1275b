"""Attention is compiled for every accelerator, by the kernel that is meant for it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels.attention import attention
from kernels.paged_attention import paged_attention
from launch.planning.targets import target_devices
from tests.targets import TARGETS

pytestmark = TARGETS
MACHINES = ['v5e:2x2', 'v5p:2x2x1', 'v6e:2x2', 'h200:4']


def compiled(machine, function, *arrays):
  """`function` of arrays (shape, dtype, axes), rows and heads over two devices each."""
  devices = np.array(target_devices(machine)).reshape(2, 2)
  mesh = Mesh(devices, ('batch', 'heads'), axis_types=(AxisType.Auto,) * 2)

  def layout(axes):
    return P(*(axis and axis.removeprefix('kv_') for axis in axes))

  def shard(run, inputs, output):
    specs = tuple(map(layout, inputs))
    options = {'in_specs': specs, 'out_specs': layout(output), 'check_vma': False}
    return jax.shard_map(run, mesh=mesh, **options)

  def run(*arrays):
    return function(*arrays, platform=devices.flat[0].platform, shard=shard)

  shapes = [
    jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, layout(axes)))
    for shape, dtype, axes in arrays
  ]
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    return jax.jit(run).lower(*shapes).compile().as_text()


@pytest.mark.parametrize('machine', MACHINES)
@pytest.mark.parametrize(
  'dtype, dim, length', [('bfloat16', 128, 1500), ('float32', 64, 300)]
)
def test_forward_and_backward(machine, dtype, dim, length):
  check_both_passes(machine, dtype, dim, length)


def check_both_passes(machine, dtype, dim, length):
  def gradient(q, k, v, ids, **options):
    def total(q, k, v):
      return (attention(q, k, v, ids, **options).astype(jnp.float32) ** 2).sum()

    return jax.grad(total, (0, 1, 2))(q, k, v)

  queries = (2, length, 8, dim), dtype, ('batch', None, 'heads', None)
  keys = (2, length, 2, dim), dtype, ('batch', None, 'kv_heads', None)
  ids = (2, length), jnp.int32, ('batch', None)
  text = compiled(machine, gradient, queries, keys, keys, ids)
  assert 'all-gather' not in text
  if not machine.startswith('h200'):
    assert text.count('tpu_custom_call') >= 3
  elif dtype == 'bfloat16':
    assert text.count('__cudnn$fmhaScaleBias') >= 2


@pytest.mark.parametrize(
  'row_segments, rules', [(1, {}), (1, {'window': 300}), (5, {})]
)
def test_a_gpu_needs_no_mask_where_it_knows_the_segments(row_segments, rules):
  length = 1500

  def gradient(q, k, v, ids, **options):
    def total(q, k, v):
      out = attention(q, k, v, ids, row_segments=row_segments, **rules, **options)
      return (out.astype(jnp.float32) ** 2).sum()

    return jax.grad(total, (0, 1, 2))(q, k, v)

  queries = (2, length, 8, 128), jnp.bfloat16, ('batch', None, 'heads', None)
  keys = (2, length, 2, 128), jnp.bfloat16, ('batch', None, 'kv_heads', None)
  ids = (2, length), jnp.int32, ('batch', None)
  text = compiled('h200:4', gradient, queries, keys, keys, ids)
  calls = re.findall(r'custom_call_target="(__cudnn[^"]*)"', text)
  assert calls == ['__cudnn$fmhaSoftmax', '__cudnn$fmhaSoftmaxBackward']
  assert not re.search(r'\[[\d,]*15\d\d,15\d\d\]', text) and 'all-gather' not in text


@pytest.mark.parametrize('machine', MACHINES[:-1])
@pytest.mark.parametrize(
  'dtype, dim, length', [('bfloat16', 128, 1500), ('float32', 64, 300)]
)
def test_rows_with_shared_prompts(machine, dtype, dim, length):
  def gradient(q, k, v, ids, prefix, **options):
    def total(q, k, v):
      out = attention(q, k, v, ids, prefix_ids=prefix, **options)
      return (out.astype(jnp.float32) ** 2).sum()

    return jax.grad(total, (0, 1, 2))(q, k, v)

  queries = (2, length, 8, dim), dtype, ('batch', None, 'heads', None)
  keys = (2, length, 2, dim), dtype, ('batch', None, 'kv_heads', None)
  ids = (2, length), jnp.int32, ('batch', None)
  text = compiled(machine, gradient, queries, keys, keys, ids, ids)
  assert text.count('tpu_custom_call') >= 6 and 'all-gather' not in text


@pytest.mark.parametrize('machine', MACHINES)
@pytest.mark.parametrize('heads', [2, 8, 16])
def test_decode(machine, heads):
  pages = (2, 4, 1152, 128), jnp.bfloat16, ('kv_heads', 'batch', None, None)
  queries = (4, heads, 128), jnp.bfloat16, ('batch', 'heads', None)
  lengths = (4,), jnp.int32, ('batch',)
  text = compiled(machine, paged_attention, queries, pages, pages, lengths)
  assert ('tpu_custom_call' in text) != machine.startswith('h200')
  assert 'all-gather' not in text
