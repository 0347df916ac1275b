"""Native attention over a cache, against `decode_attention` and float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention import decode_attention
from kernels.native import cached_attention
from tests.marks import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER
# Slots, heads, heads of keys, width, sizes of chunks.
CASES = {
  'heads that share keys in threes': (8, 9, 3, 64, (64, 64, 64)),
  'no two heads share keys': (4, 4, 4, 24, (32,)),
  'all heads share keys, and the last chunk is short': (3, 8, 1, 40, (64, 32)),
  'seven heads of wide keys': (2, 7, 1, 128, (64, 64)),
  'one slot and narrow heads': (1, 6, 1, 8, (96,)),
  'a width that fills no block': (2, 5, 1, 33, (64, 32)),
}


def draw(slots, heads, kv_heads, dim, sizes):
  key = jax.random.key(0)
  q = 3 * jax.random.normal(key, (slots, heads, dim))
  keys = [jax.random.normal(key, (slots, kv_heads, dim, n)) + n for n in sizes]
  values = [jax.random.normal(key, (slots, kv_heads, n, dim)) for n in sizes]
  positions = np.arange(slots) * 29 % sum(sizes)
  positions[-1] = sum(sizes) - 1
  return q, keys, values, jnp.asarray(positions, jnp.int32)


def in_float64(q, keys, values, positions):
  q, *rest = (
    np.asarray(x, np.float64)
    for x in (q, np.concatenate(keys, 3), np.concatenate(values, 2))
  )
  keys, values = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in rest)
  scores = np.einsum('shd,shdt->sht', q, keys)
  hidden = np.arange(scores.shape[-1]) > np.asarray(positions)[:, None]
  scores = np.where(hidden[:, None], -np.inf, scores)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  return np.einsum('sht,shtd->shd', weights, values)


attend = jax.jit(cached_attention.attend)


@pytest.mark.parametrize('case', CASES)
def test_it_computes_attention(case):
  q, keys, values, positions = draw(*CASES[case])
  keys = [k - n for k, n in zip(keys, CASES[case][-1], strict=True)]
  y = attend(q, keys, values, positions)
  np.testing.assert_allclose(y, in_float64(q, keys, values, positions), atol=3e-5)
  plain = decode_attention(q, keys, values, positions, None, scale=1.0)
  np.testing.assert_allclose(y, plain, atol=3e-5)


def test_scores_far_apart_do_not_overflow():
  q, keys, values, positions = draw(3, 4, 2, 16, (64,))
  keys = [1e4 * k for k in keys]
  y = attend(q, keys, values, positions)
  assert np.isfinite(y).all()
  np.testing.assert_allclose(y, in_float64(q, keys, values, positions), atol=1e-5)


def test_what_lies_behind_a_position_is_not_seen():
  q, keys, values, positions = draw(4, 6, 2, 24, (64, 32))
  expected = attend(q, keys, values, positions)
  places = [np.arange(64), 64 + np.arange(32)]
  seen = [place <= np.asarray(positions)[:, None, None, None] for place in places]
  keys = [jnp.where(s, k, jnp.nan) for s, k in zip(seen, keys, strict=True)]
  values = [
    jnp.where(s.swapaxes(2, 3), v, jnp.nan) for s, v in zip(seen, values, strict=True)
  ]
  np.testing.assert_array_equal(attend(q, keys, values, positions), expected)


def test_a_slot_has_the_bits_that_it_has_alone_and_in_other_chunks():
  q, keys, values, positions = draw(5, 6, 2, 64, (64, 64))
  expected = attend(q, keys, values, positions)
  for slot in range(5):
    one = slice(slot, slot + 1)
    alone = q[one], [k[one] for k in keys], [v[one] for v in values], positions[one]
    np.testing.assert_array_equal(attend(*alone), expected[one])
  whole = [jnp.concatenate(keys, 3)], [jnp.concatenate(values, 2)]
  np.testing.assert_array_equal(attend(q, *whole, positions), expected)


def test_a_limit_changes_no_slot_before_it():
  q, keys, values, positions = draw(4, 6, 2, 24, (64, 64))
  options = {'scale': 1.0, 'native': True}
  positions = positions.at[-1].set(50)
  whole = decode_attention(q, keys, values, positions, None, **options)
  np.testing.assert_array_equal(whole, attend(q, keys, values, positions))
  limit = jnp.int32(positions.max() + 1)
  idle = positions.at[0].set(127)  # at the end of the cache
  cut = decode_attention(q, keys, values, idle, limit, **options)
  np.testing.assert_array_equal(cut[1:], whole[1:])


@pytest.mark.parametrize('options', [{'window': 8}, {'softcap': 5.0}, {'sinks': True}])
def test_other_rules_are_left_to_jnp(options):
  q, keys, values, positions = draw(2, 4, 2, 16, (64,))
  if 'sinks' in options:
    options = {'sinks': jnp.ones(4)}
  plain = decode_attention(q, keys, values, positions, None, **options)
  same = decode_attention(q, keys, values, positions, None, native=True, **options)
  np.testing.assert_array_equal(plain, same)


def test_caches_that_it_cannot_read_are_left_to_jnp():
  keys, values = [jnp.zeros((1, 1, 4, 64))], [jnp.zeros((1, 1, 64, 4))]
  assert cached_attention.fits(keys, values)
  assert not cached_attention.fits(keys, ())
  assert not cached_attention.fits([keys[0].astype('bfloat16')], values)
  assert not cached_attention.fits([keys[0][..., :40]], [values[0][:, :, :40]])


def misfits():
  q, keys, values, positions = draw(2, 4, 2, 16, (64, 32))
  yield 'half of the slots', (q, positions[:1], *keys, *values)
  yield 'wider positions', (q, positions.astype('int16'), *keys, *values)
  yield 'heads that cannot share', (q[:, :3], positions, *keys, *values)
  yield 'values before keys', (q, positions, *values, *keys)
  yield 'a chunk of values too few', (q, positions, *keys, values[0])
  yield 'keys in bfloat16', (q, positions, keys[0].astype('bfloat16'), values[0])
  yield 'a chunk of 40', (q, positions, keys[0][..., :40], values[0][:, :, :40])
  yield 'no chunks', (q, positions)


def test_what_does_not_fit_together_is_refused():
  q = next(misfits())[1][0]
  call = lambda *arguments: jax.ffi.ffi_call(  # noqa: E731
    cached_attention.TARGET, jax.ShapeDtypeStruct(arguments[0].shape, q.dtype)
  )(*arguments)
  error = jax.errors.JaxRuntimeError
  for what, arguments in misfits():
    with pytest.raises(error, match='shapes or types do not fit together'):
      pytest.fail(f'{what}: {jax.block_until_ready(call(*arguments))}')
  q, keys, values, positions = draw(2, 4, 2, 16, (64,))
  with pytest.raises(error, match='a position is negative'):
    jax.block_until_ready(call(q, positions.at[0].set(-1), *keys, *values))
