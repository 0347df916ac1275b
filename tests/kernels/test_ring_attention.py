"""Attention around a ring is attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from kernels.attention import attention
from kernels.ring_attention import ring_attention, unzigzag, zigzag
from tests.marks import slow


def ring(devices, block, q, k, v, segment_ids, prefix_ids):
  """`ring_attention` of whole arrays, over that many devices."""
  mesh = jax.make_mesh(
    (devices,), ('x',), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
  )

  def run(q, k, v, segment_ids, prefix_ids):
    return ring_attention(
      q, k, v, segment_ids, prefix_ids=prefix_ids, axis='x', block=block
    )

  arrays = jax.tree.map(
    lambda x: zigzag(x, devices), (q, k, v, segment_ids, prefix_ids)
  )
  run = jax.shard_map(
    run, mesh=mesh, in_specs=(P('x'),) * 5, out_specs=P('x'), check_vma=False
  )
  return unzigzag(run(*arrays), devices)


@pytest.mark.parametrize('devices', [1, 2, 3, 4])
def test_every_device_has_its_share_of_early_and_late_tokens(devices):
  x = np.arange(2 * 24 * 3).reshape(2, 24, 3)
  laid = jax.jit(zigzag, static_argnums=1)(x, devices)
  back = jax.jit(unzigzag, static_argnums=1)(laid, devices)
  np.testing.assert_array_equal(back, x)
  t = 24 // (2 * devices)
  first = np.asarray(laid)[0, :, 0] // 3
  np.testing.assert_array_equal(first, [*range(t), *range(24 - t, 24)])


@pytest.mark.parametrize(
  'devices, heads, kv_heads, length, prefix, dtype',
  [
    (2, 6, 2, 24, True, jnp.float32),
    slow(3, 3, 1, 36, True, jnp.float32),
    slow(4, 3, 3, 40, False, jnp.float32),
    (4, 4, 2, 32, True, jnp.bfloat16),
  ],
)
def test_values_and_gradients(devices, heads, kv_heads, length, prefix, dtype):
  rng = np.random.default_rng(0)
  sizes = heads, kv_heads, kv_heads, heads
  q, k, v, slope = (
    jnp.asarray(rng.normal(size=(2, length, n, 8)), dtype) for n in sizes
  )
  ids = np.sort(rng.integers(1, 4, (2, length)), axis=1).astype(np.int32)
  ids[0, -3:] = 0
  prefix_ids = np.where(ids == 3, 1, 0).astype(np.int32) if prefix else None

  def results(function):
    def run(q, k, v):
      out, back = jax.vjp(function, q, k, v)
      return out, back(slope.astype(out.dtype))

    return jax.jit(run)(q, k, v)

  wide = jax.tree.map(lambda x: x.astype(jnp.float32), (q, k, v))
  there = (ids != 0)[..., None, None]
  slope = slope * there
  actual = results(lambda *a: ring(devices, 4, *a, ids, prefix_ids))
  q, k, v = wide
  wanted = results(lambda *a: attention(*a, ids, prefix_ids=prefix_ids))
  bound = 2e-6 if dtype == jnp.float32 else 4e-2
  for one, two in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
    assert one.dtype == dtype
    error = jnp.abs(one.astype(jnp.float32) - two).max()
    assert error <= bound * max(1.0, float(jnp.abs(two).max()))
