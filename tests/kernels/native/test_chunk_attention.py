"""Attention to a cache in chunks, against numpy in double precision."""

import pathlib
import platform
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models import kv_cache
from kernels.attention import decode_attention
from kernels.native import chunk_attention, library
from tests.marks import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER
DTYPES = ['float32', 'bfloat16']
# Slots, query heads, key heads, width, chunks: heads in groups of 1 to 9, chunks with
# and without a rest, widths of whole registers and not.
SHAPES = [
  (1, 1, 1, 16, (32,)),
  (8, 9, 3, 64, (64, 64, 64)),
  (5, 8, 8, 128, (64, 64, 32)),
  (3, 14, 2, 80, (96, 96, 64)),
  (2, 9, 1, 256, (128,) * 8 + (32,)),
  (16, 8, 2, 48, (64, 32)),
]


class Case(NamedTuple):
  q: np.ndarray
  keys: tuple[jax.Array, ...]
  values: tuple[jax.Array, ...]
  positions: np.ndarray


def draw(shape, dtype, seed=0, scale=1.0):
  slots, heads, kv_heads, width, sizes = shape
  rng = np.random.default_rng(seed)
  normal = lambda *dims: rng.standard_normal(dims, np.float32)  # noqa: E731
  keys = [jnp.asarray(scale * normal(slots, kv_heads, width, n), dtype) for n in sizes]
  values = [jnp.asarray(normal(slots, kv_heads, n, width), dtype) for n in sizes]
  positions = rng.integers(0, sum(sizes), slots).astype(np.int32)
  positions[0] = sum(sizes) - 1
  return Case(normal(slots, heads, width), tuple(keys), tuple(values), positions)


def expected(case, scale):
  """One slot and head after the other, in float64."""
  keys = np.concatenate([np.asarray(k, np.float64) for k in case.keys], axis=3)
  values = np.concatenate([np.asarray(v, np.float64) for v in case.values], axis=2)
  group = case.q.shape[1] // keys.shape[1]
  out = np.zeros(case.q.shape)
  for slot, position in enumerate(case.positions):
    for head in range(case.q.shape[1]):
      seen = slice(0, position + 1)
      scores = scale * (case.q[slot, head] @ keys[slot, head // group, :, seen])
      weights = np.exp(scores - scores.max())
      out[slot, head] = weights @ values[slot, head // group, seen] / weights.sum()
  return out


decode = jax.jit(chunk_attention.decode, static_argnames='scale')
write_and_decode = jax.jit(chunk_attention.write_and_decode)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('shape', SHAPES)
def test_attention_up_to_each_position(shape, dtype):
  case = draw(shape, dtype)
  out = decode(*case, None)
  assert out.dtype == jnp.float32
  np.testing.assert_allclose(out, expected(case, shape[3] ** -0.5), rtol=0, atol=3e-6)
  scaled = decode(*case, None, scale=0.7)
  np.testing.assert_allclose(scaled, expected(case, 0.7), rtol=0, atol=3e-5)


@pytest.mark.parametrize('scale', [30.0, 1e4])
def test_large_scores(scale):
  case = draw(SHAPES[1], 'float32', scale=scale)
  out = decode(*case, None)
  np.testing.assert_allclose(out, expected(case, 64**-0.5), rtol=0, atol=2e-3)


@pytest.mark.parametrize('dtype', DTYPES)
def test_what_lies_behind_a_position_does_not_matter(dtype):
  """Neither what was left there, nor a limit behind all positions."""
  case = draw(SHAPES[3], dtype)
  case.positions[:] = 3, 64, 130
  out = decode(*case, None)
  np.testing.assert_array_equal(decode(*case, jnp.int32(131)), out)
  spoilt = []
  for arrays, axis in ((case.keys, 3), (case.values, 2)):
    whole = np.concatenate([np.asarray(x, np.float32) for x in arrays], axis=axis)
    for slot, position in enumerate(case.positions):
      whole[(slot, *(slice(None),) * (axis - 1), slice(position + 1, None))] = np.nan
    ends = np.cumsum([x.shape[axis] for x in arrays])[:-1]
    spoilt.append([jnp.asarray(x, dtype) for x in np.split(whole, ends, axis=axis)])
  np.testing.assert_array_equal(decode(case.q, *spoilt, case.positions, None), out)


def test_an_idle_slot_reads_nothing():
  """It stands at the last position, and the limit is that of the busy ones."""
  case = draw(SHAPES[1], 'float32')
  case.positions[1:] = 5
  out = decode(*case, jnp.int32(6))
  np.testing.assert_array_equal(out[1:], decode(*case, None)[1:])
  assert not np.asarray(out[0]).any()


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('shape', SHAPES)
def test_a_slot_has_the_same_bits_alone(shape, dtype):
  case = draw(shape, dtype)
  out = decode(*case, None)
  for slot in range(shape[0]):
    own = jax.tree.map(lambda x, slot=slot: x[slot : slot + 1], case)
    np.testing.assert_array_equal(decode(*own, None), out[slot : slot + 1])


def test_not_a_number_is_not_hidden():
  case = draw(SHAPES[1], 'float32')
  case.q[2, 4, 7] = np.nan
  is_nan = np.isnan(decode(*case, None))
  assert is_nan[2, 4].all() and is_nan.sum() == 64


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('shape', SHAPES)
def test_new_keys_and_values_are_written_first(shape, dtype):
  case = draw(shape, dtype)
  slots, _, kv_heads, width, _ = shape
  new = np.random.default_rng(1).standard_normal((2, slots, kv_heads, width))
  k, v = jnp.asarray(new, jnp.float32)
  keys = kv_cache.write(case.keys, 'k', k, case.positions)
  values = kv_cache.write(case.values, 'v', v, case.positions)
  out, *chunks = write_and_decode(
    case.q, k, v, case.keys, case.values, case.positions, None
  )
  np.testing.assert_array_equal(out, decode(case.q, keys, values, case.positions, None))
  jax.tree.map(np.testing.assert_array_equal, tuple(chunks), (keys, values))


def test_nothing_is_written_outside_of_the_chunks():
  case = draw(SHAPES[1], 'float32')
  case.positions[2:4] = 192, -1
  new = jnp.full((8, 3, 64), 7.0)
  _, keys, values = write_and_decode(
    case.q, new, new, case.keys, case.values, case.positions, None
  )
  for slot, count in ((1, 64), (2, 0), (3, 0)):
    assert sum(int((k[slot] == 7).sum()) for k in keys) == 3 * count
    assert sum(int((v[slot] == 7).sum()) for v in values) == 3 * count


def test_chunks_that_are_given_away_are_written_in_place():
  case = draw(SHAPES[1], 'float32')

  def steps(keys, values):
    def step(_, carry):
      out, keys, values = carry
      new = out[:, :3]
      return chunk_attention.write_and_decode(
        out, new, new, keys, values, case.positions, None
      )

    return jax.lax.fori_loop(0, 4, step, (jnp.asarray(case.q), keys, values))

  program = jax.jit(steps, donate_argnums=(0, 1)).lower(case.keys, case.values)
  compiled = program.compile()
  chunk = 8 * 3 * 64 * 64 * 4
  assert compiled.memory_analysis().temp_size_in_bytes < chunk
  text = compiled.as_text()
  assert 'copy(f32[8,3,64,64]' not in text.replace(' ', '')


@pytest.mark.skipif(platform.machine() != 'x86_64', reason='is not x86_64')
@pytest.mark.parametrize(
  'processor, needs, lanes',
  [
    ('x86-64', set(), 8),
    ('x86-64-v3', {'avx2', 'fma', 'bmi2'}, 8),
    ('x86-64-v4', {'avx512f', 'avx512bw', 'avx512cd', 'avx512dq', 'avx512vl'}, 16),
  ],
)
def test_older_processors_compute_the_same(
  processor, needs, lanes, monkeypatch, tmp_path
):
  flags = pathlib.Path('/proc/cpuinfo').read_text().split()
  if missing := needs - set(flags):
    pytest.skip(f'has no {", ".join(sorted(missing))}')
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  suffix = f'_{processor}_attention'
  assert library.register(processor, suffix).lanes == lanes
  monkeypatch.setattr(chunk_attention, 'TARGET', chunk_attention.TARGET + suffix)
  for dtype in DTYPES:
    for shape in SHAPES:
      case = draw(shape, dtype)
      out = jax.jit(chunk_attention.decode)(*case, None)
      wanted = expected(case, shape[3] ** -0.5)
      np.testing.assert_allclose(out, wanted, rtol=0, atol=3e-6)


@pytest.mark.parametrize(
  'shape, dtype, rules, why',
  [
    (SHAPES[1], 'float32', {}, ''),
    (SHAPES[1], 'float32', {'scale': 0.1, 'window': 0}, ''),
    (SHAPES[1], 'float32', {'window': 64}, 'takes neither sinks nor a window'),
    (SHAPES[1], 'float32', {'softcap': 30.0}, 'takes neither sinks nor a window'),
    (SHAPES[1], 'float32', {'sinks': jnp.zeros(9)}, 'takes neither sinks'),
    (SHAPES[1], 'float16', {}, 'takes float32 or bfloat16, not float16'),
    ((2, 2, 1, 20, (64,)), 'float32', {}, 'takes a head_dim up to 512'),
    ((2, 2, 1, 576, (64,)), 'float32', {}, 'takes a head_dim up to 512'),
    ((2, 2, 1, 64, (40,)), 'float32', {}, 'takes up to 16 chunks of multiples of 32'),
  ],
)
def test_what_it_does_not_take(shape, dtype, rules, why):
  case = draw(shape, dtype)
  obstacle = chunk_attention.obstacle('cpu', case.keys, case.values, **rules)
  assert obstacle.startswith(why) and bool(obstacle) == bool(why)


def test_it_is_for_cpus_and_can_be_turned_off():
  case = draw(SHAPES[1], 'float32')
  chunks = case.keys, case.values
  assert chunk_attention.obstacle('gpu', *chunks) == 'is for cpu, not gpu'
  options = {'kernels': 'reference'}
  assert chunk_attention.obstacle('cpu', *chunks, **options) == 'not asked for'
  latent = chunk_attention.obstacle('cpu', case.keys, ())
  assert latent == 'takes no keys that are also the values'


def test_it_computes_what_the_reference_does():
  case = draw(SHAPES[1], 'bfloat16')
  limit = jnp.int32(case.positions.max() + 1)
  plain = jax.jit(decode_attention)(*case, limit)
  np.testing.assert_allclose(decode(*case, limit), plain, rtol=0, atol=3e-6)


def misfits():
  """Arguments that do not fit together."""
  case = draw((2, 4, 2, 64, (64,)), 'float32')
  k, v = case.keys[0], case.values[0]
  limit = np.int32(4)
  return {
    'heads': (case.q[:, :3], case.positions, limit, k, v),
    'slots': (case.q[:1], case.positions, limit, k, v),
    'positions': (case.q, case.positions.astype(np.uint32), limit, k, v),
    'limit': (case.q, case.positions, np.float32(4), k, v),
    'types': (case.q, case.positions, limit, k, v.astype('bfloat16')),
    'order': (case.q, case.positions, limit, k[..., :32], v),
    'values': (case.q, case.positions, limit, k, k[:, :, :32]),
    'none': (case.q, case.positions, limit),
    'odd': (case.q, case.positions, limit, k),
  }


@pytest.mark.parametrize('name', misfits())
def test_arrays_that_do_not_fit_are_refused(name):
  library.widths()
  arguments = misfits()[name]
  out = jax.ShapeDtypeStruct(arguments[0].shape, jnp.float32)
  with pytest.raises(jax.errors.JaxRuntimeError, match='jaxrl_chunk_attention'):
    jax.block_until_ready(
      jax.jit(jax.ffi.ffi_call(chunk_attention.TARGET, [out]))(*arguments)
    )
