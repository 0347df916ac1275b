"""Paged attention against the plain one, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kernels import paged_attention
from kernels.attention import decode_attention
from tests.marks import slow

LENGTHS = jnp.array([1, 128, 200, 256], jnp.int32)
reference = jax.jit(paged_attention.reference)


def inputs(heads, kv_heads, dim, dtype, room=256):
  keys = jax.random.split(jax.random.key(0), 3)
  pages = (kv_heads, len(LENGTHS), room, dim)
  shapes = [(len(LENGTHS), heads, dim), pages, pages]
  return [
    jax.random.normal(k, s).astype(dtype) for k, s in zip(keys, shapes, strict=True)
  ]


@jax.jit
def in_chunks(q, keys, values, lengths):
  """The same through the chunks that other platforms have."""
  k, v = keys.transpose(1, 0, 3, 2), values.swapaxes(0, 1)
  return decode_attention(q, [k], [v], lengths - 1, jnp.int32(256))


@pytest.mark.parametrize('heads, kv_heads', [(2, 2), (8, 2), (8, 1)])
def test_the_plain_ones_agree(heads, kv_heads):
  arrays = inputs(heads, kv_heads, 16, jnp.float32)
  out = reference(*arrays, LENGTHS)
  np.testing.assert_allclose(out, in_chunks(*arrays, LENGTHS), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  'heads, kv_heads, room', [(4, 1, 256), (8, 2, 1024), slow(8, 4, 640)]
)
def test_mosaic(heads, kv_heads, room):
  """One page a slot, and several."""
  arrays = inputs(heads, kv_heads, 128, jnp.bfloat16, room)
  lengths = LENGTHS * room // 256
  expected = reference(*(x.astype(jnp.float32) for x in arrays), lengths)
  with pltpu.force_tpu_interpret_mode():
    out = jax.jit(paged_attention.mosaic)(*arrays, lengths)
  assert out.dtype == jnp.float32
  np.testing.assert_allclose(out, expected, atol=0.02)


def test_a_slot_depends_on_no_other_and_not_on_what_lies_behind_it():
  q, keys, values = inputs(8, 2, 128, jnp.bfloat16)
  behind = jnp.arange(256) >= LENGTHS[2]
  spoilt = [jnp.where(behind[:, None], 7, x) for x in (keys, values)]
  spoilt = [x.at[:, (0, 1, 3)].set(3) for x in spoilt]
  run = jax.jit(paged_attention.mosaic)
  with pltpu.force_tpu_interpret_mode():
    one = run(q, keys, values, LENGTHS)
    two = run(q.at[0].set(9), *spoilt, LENGTHS.at[1].set(5))
  np.testing.assert_array_equal(one[2], two[2])


def test_a_kernel_is_chosen_where_it_fits():
  choose = paged_attention.choose_kernel
  assert choose(128, 'bfloat16', platform='tpu') == 'mosaic'
  assert choose(64, 'bfloat16', platform='tpu') == 'reference'
  assert choose(128, 'float32', platform='tpu') == 'reference'
  assert choose(128, 'bfloat16', platform='gpu') == 'reference'
  assert choose(128, 'bfloat16', platform='cpu') == 'reference'
  assert choose(128, 'bfloat16', platform='tpu', kernels='reference') == 'reference'
