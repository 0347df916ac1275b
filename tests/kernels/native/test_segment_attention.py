"""Attention within segments on a CPU, against the same in plain jnp and float64."""

import dataclasses
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention import attention, reference_attention, skips_other_segments
from kernels.native import library, segment_attention
from tests.marks import NEEDS_COMPILER
from tests.models import small

pytestmark = NEEDS_COMPILER
# Rows, tokens, heads, heads of keys, head_dim.
SHAPES = [(1, 1, 1, 1, 16), (2, 37, 4, 2, 32), (1, 200, 3, 3, 64), (2, 130, 6, 1, 80)]
attend = segment_attention.segment_attention


def side_by_side(rng, length):
  """Segments of any lengths; each third one is a prompt of the two that follow."""
  ids, prefixes, segment, used = [], [], 0, max(1, length - 3)
  while len(ids) < used:
    segment += 1
    count = int(rng.integers(1, 40))
    ids += [segment] * count
    prefixes += [0 if segment % 3 == 1 else (segment - 1) // 3 * 3 + 1] * count
  padding = [0] * (length - used)
  return ids[:used] + padding, prefixes[:used] + padding


def scattered(rng, length):
  """Tokens of four segments and padding in any order."""
  ids = rng.integers(0, 5, length)
  return ids, np.where(ids > 2, 1, 0)


def whole(rng, length):
  del rng
  return [1] * length, [0] * length


LAYOUTS = [side_by_side, scattered, whole]


def draw(shape, layout, dtype='float32'):
  rows, length, heads, kv_heads, width = shape
  rng = np.random.default_rng(0)
  sizes = [(rows, length, count, width) for count in (heads, kv_heads, kv_heads)]
  arrays = [jnp.asarray(rng.standard_normal(size), dtype) for size in sizes]
  ids = [layout(rng, length) for _ in range(rows)]
  segments, prefixes = (jnp.asarray([row[i] for row in ids], jnp.int32) for i in (0, 1))
  return *arrays, segments, prefixes


def value_and_gradients(function, q, k, v, segments, prefixes):
  """The outputs at tokens, and the gradients of their sum, each weighed by its own."""
  weights = np.random.default_rng(1).standard_normal(q.shape).astype(q.dtype)
  weights = weights * (segments > 0)[..., None, None]

  def total(*arrays):
    out = function(*arrays, segments, prefixes)
    return (out * weights).sum(), jnp.where((segments > 0)[..., None, None], out, 0)

  run = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))
  gradients, out = run(q, k, v)
  return out, *gradients


def exactly(function, *case):
  """What a function gives in float64."""
  with jax.enable_x64(True):
    wide = [jnp.asarray(np.asarray(x), jnp.float64) for x in case[:3]]
    return jax.tree.map(np.asarray, value_and_gradients(function, *wide, *case[3:]))


def assert_all_close(found, wanted):
  for x, y in zip(found, wanted, strict=True):
    assert x.dtype == jnp.float32 and np.isfinite(x).all()
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=3e-6 * max(1, np.abs(y).max()))


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_values_and_gradients_are_the_plain_ones(shape, layout):
  case = draw(shape, layout)
  for run in (functools.partial(attend, scale=0.3), attend):
    plain = functools.partial(reference_attention, **getattr(run, 'keywords', {}))
    assert_all_close(value_and_gradients(run, *case), exactly(plain, *case))


def test_without_prefixes_a_token_sees_its_own_segment_alone():
  q, k, v, segments, prefixes = draw(SHAPES[1], side_by_side)
  out = attend(q, k, v, segments)
  np.testing.assert_array_equal(out, attend(q, k, v, segments, 0 * prefixes))
  assert np.abs(out - attend(q, k, v, segments, prefixes)).max() > 0.1


def test_padding_gets_zeros_and_gives_none():
  q, k, v, segments, prefixes = draw(SHAPES[3], scattered)
  out, back = jax.vjp(lambda *x: attend(*x, segments, prefixes), q, k, v)
  gradients = back(jnp.ones_like(out))
  for x in (out, *gradients):
    assert not np.asarray(x)[np.asarray(segments) == 0].any()


def test_a_row_has_the_same_bits_alone_and_in_a_shorter_row():
  case = draw((3, 130, 4, 2, 32), side_by_side)
  found = value_and_gradients(attend, *case)
  for row in range(3):
    alone = value_and_gradients(attend, *(x[row : row + 1] for x in case))
    weights_differ = slice(None) if row == 0 else slice(0, 1)  # of rows but the first
    for x, y in list(zip(found, alone, strict=True))[weights_differ]:
      np.testing.assert_array_equal(x[row], y[0])
  shorter = value_and_gradients(attend, *(x[:1, :71] for x in case))
  np.testing.assert_array_equal(found[0][0, :71], shorter[0][0])


def test_not_a_number_is_not_hidden():
  q, k, v, segments, prefixes = draw(SHAPES[1], whole)
  q = q.at[1, 5, 2, 0].set(jnp.nan)
  out = np.array(attend(q, k, v, segments, prefixes))
  assert np.isnan(out[1, 5, 2]).all()
  out[1, 5, 2] = 0
  assert np.isfinite(out).all()


def test_rows_may_be_mapped():
  case = draw((3, 37, 4, 2, 32), side_by_side)
  mapped = jax.vmap(attend)(*(x[:, None] for x in case))
  np.testing.assert_array_equal(mapped[:, 0], attend(*case))


@pytest.mark.parametrize(
  'policy, calls',
  [('none', 1), ('products', 1), ('names', 1), ('full', 2), ('dots', 2)],
)
def test_policies_that_keep_its_output_do_not_compute_it_again(policy, calls):
  model, params = small.model_and_params(num_layers=1)
  model = dataclasses.replace(model, remat=policy)

  def total(params):
    tokens = small.tokens(2, 9)
    return model.policy_outputs(params, tokens, tokens * 0 + 1).logprobs.sum()

  trace = str(jax.make_jaxpr(jax.grad(total))(params))
  assert len(re.findall(r'target_name=jaxrl_attention\s', trace)) == calls
  assert trace.count('target_name=jaxrl_attention_back') == 1


@pytest.mark.parametrize(
  'processor, needs',
  [
    ('x86-64', set()),
    ('x86-64-v3', {'avx2', 'fma', 'bmi2'}),
    ('x86-64-v4', {'avx512f', 'avx512bw', 'avx512cd', 'avx512dq', 'avx512vl'}),
  ],
)
def test_older_processors_compute_the_same(processor, needs, monkeypatch, tmp_path):
  flags = pathlib.Path('/proc/cpuinfo').read_text().split()
  if missing := needs - set(flags):
    pytest.skip(f'has no {", ".join(sorted(missing))}')
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  suffix = f'_{processor}_segments'
  library.register(processor, suffix)
  call = segment_attention._call
  monkeypatch.setattr(
    segment_attention, '_call', lambda name, *rest: call(name + suffix, *rest)
  )
  for shape in SHAPES:
    case = draw(shape, side_by_side)
    assert_all_close(
      value_and_gradients(attend, *case), exactly(reference_attention, *case)
    )


@pytest.mark.parametrize(
  'options, why',
  [
    ({}, ''),
    ({'scale': 0.1, 'window': 0, 'softcap': 0.0, 'prefix_ids': True}, ''),
    ({'window': 8}, 'takes no window'),
    ({'softcap': 30.0}, 'takes no softcap'),
    ({'sinks': jnp.zeros(4)}, 'takes no sinks'),
    ({'key_ends': jnp.zeros((2, 37))}, 'takes no key_ends'),
    ({'shard': lambda *x: x}, 'takes one device'),
  ],
)
def test_what_it_does_not_take(options, why):
  q, k, v, *_ = draw(SHAPES[1], side_by_side)
  assert skips_other_segments(q, k, v, platform='cpu', **options) == (not why)
  if why:
    asked = set(options) - {'shard'}
    found = segment_attention.candidate(q, k, v, asked)
    assert found == why or 'shard' in options


@pytest.mark.parametrize(
  'case, why',
  [
    (draw(SHAPES[1], whole, 'bfloat16'), 'takes float32, not bfloat16'),
    (draw((1, 9, 2, 1, 20), whole), 'takes a head_dim up to 512 that'),
    (draw((1, 9, 2, 1, 528), whole), 'takes a head_dim up to 512 that'),
  ],
)
def test_what_arrays_it_does_not_take(case, why):
  assert segment_attention.candidate(*case[:3], ()).startswith(why)
  narrow = *case[:2], case[2][..., :8]
  assert 'values as wide' in segment_attention.candidate(
    *(x.astype(jnp.float32) for x in narrow), ()
  )


def test_attention_chooses_it_on_one_device():
  q, k, v, segments, prefixes = draw(SHAPES[1], side_by_side)

  def calls(**options):
    run = functools.partial(attention, prefix_ids=prefixes, platform='cpu', **options)
    return 'jaxrl_attention' in str(jax.make_jaxpr(run)(q, k, v, segments))

  assert calls()
  assert not calls(kernels='reference') and not calls(window=4, positions=segments)
  assert not skips_other_segments(q, k, v, kernels='reference')
  assert not skips_other_segments(q, k, v, platform='gpu')


def misfits():
  """Arguments of the target, and shapes of its results, that do not fit together."""
  q, k, v, segments, prefixes = draw((1, 9, 4, 2, 16), whole)
  good, scratch = (q, k, v, segments, prefixes, 1.0), segment_attention._scratch(q, k)
  scratch = 2 * scratch[0], scratch[1]
  shapes, together = [q.shape, (1, 4, 9, 2), scratch], 'do not fit together'
  yield good[:5], shapes, 'other arrays'
  yield good, shapes[:2], 'other arrays'
  yield (q[0], *good[1:]), shapes, 'need four axes'
  yield (q, k[:, :8], *good[2:]), shapes, together
  yield (q[:, :, :3], *good[1:]), [(1, 9, 3, 16), (1, 3, 9, 2), scratch], together
  narrow = *(x[..., :2] for x in good[:3]), *good[3:]
  yield narrow, [(1, 9, 4, 2), *shapes[1:]], together
  yield (*good[:3], segments.astype(jnp.float32), *good[4:]), shapes, together
  yield good, [q.shape, (1, 4, 9, 1), scratch], together
  yield good, [*shapes[:2], (4, 20)], 'too little scratch'
  yield good, [*shapes[:2], (3, scratch[1])], 'too little scratch'


@pytest.mark.parametrize('arrays, shapes, why', list(misfits()))
def test_what_does_not_fit_is_refused(arrays, shapes, why):
  library.widths()
  target = segment_attention.TARGET
  arrays = [jnp.asarray(x) for x in arrays]
  with pytest.raises(jax.errors.JaxRuntimeError, match=f'jaxrl_attention: .*{why}'):
    jax.block_until_ready(segment_attention._call(target, arrays, shapes))
