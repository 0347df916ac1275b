"""Matrices in 8 bits, against numpy and, where it is installed, against qwix."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kernels import block_rounding
from kernels.block_rounding import BlockFormat

FORMATS = [
  BlockFormat(dtype, block)
  for dtype in ('int8', 'float8_e4m3fn')
  for block in (1, 7, 32, 1000)
]
LARGEST = {'int8': 127.0, 'float8_e4m3fn': 448.0}
encode = jax.jit(block_rounding.encode, static_argnums=1)
decode = jax.jit(block_rounding.decode)


def matrix(*shape, dtype='float32'):
  draw = np.random.default_rng(0)
  x = draw.standard_normal(shape) * 10.0 ** draw.integers(-4, 5, shape[-1])
  x[..., 3] = 0
  return jnp.asarray(x, dtype)


def restated(matrix, form):
  """Codes and scales of `[inputs, outputs]`, one after the other."""
  inputs, outputs = matrix.shape
  num_blocks = -(-inputs // form.block)
  size = -(-inputs // num_blocks)
  codes = np.zeros(matrix.shape)
  scales = np.ones((num_blocks, outputs), np.float32)
  for b in range(num_blocks):
    for o in range(outputs):
      block = np.asarray(matrix[b * size : (b + 1) * size, o], np.float64)
      scale = float(ml_dtypes.bfloat16(abs(block).max() / LARGEST[form.dtype]))
      if scale < 1e-30:
        continue
      scales[b, o] = scale
      ratio = np.clip(block / scale, -LARGEST[form.dtype], LARGEST[form.dtype])
      rounds = np.round if form.dtype == 'int8' else ml_dtypes.float8_e4m3fn
      codes[b * size : (b + 1) * size, o] = rounds(ratio.astype(np.float32))
  return codes, scales


@pytest.mark.parametrize('form', FORMATS, ids=str)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_codes_and_scales_are_those_of_numpy(form, dtype):
  x = matrix(33, 9, dtype=dtype)
  codes, scales = encode(x, form)
  assert codes.dtype == form.dtype and scales.dtype == jnp.bfloat16
  expected_codes, expected_scales = restated(np.asarray(x, np.float32), form)
  np.testing.assert_array_equal(np.asarray(scales, np.float32), expected_scales)
  np.testing.assert_array_equal(np.asarray(codes, np.float64), expected_codes)
  size = -(-33 // len(expected_scales))
  wide = np.repeat(expected_scales, size, axis=0)[:33] * expected_codes
  np.testing.assert_array_equal(np.asarray(decode(codes, scales), np.float64), wide)


@pytest.mark.parametrize('form', FORMATS, ids=str)
def test_what_was_rounded_stays_as_it_is(form):
  stack = matrix(2, 33, 9)
  once = encode(stack, form)
  again = encode(decode(*once), form)
  for a, b in zip(once, again, strict=True):
    np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_errors_are_at_most_half_a_step():
  x = matrix(64, 9)
  codes, scales = encode(x, BlockFormat('int8', 16))
  step = np.repeat(np.asarray(scales, np.float32), 16, axis=0)
  error = np.abs(np.asarray(decode(codes, scales)) - np.asarray(x))
  # The largest of a block may lie a quarter of a step beyond the largest code.
  assert (error <= step * 0.5001).all() and error.max() > 0


@pytest.mark.parametrize('dtype', ['int8', 'float8_e4m3fn'])
def test_what_is_not_finite_stays_so(dtype):
  x = matrix(8, 9).at[1, 2].set(jnp.nan)
  back = np.asarray(decode(*encode(x, BlockFormat(dtype, 4))))
  assert np.isnan(back[:4, 2]).any() and np.isfinite(np.delete(back, 2, 1)).all()


@pytest.mark.parametrize('form', FORMATS[1::2], ids=str)
def test_the_gradient_is_that_at_the_rounded_matrix(form):
  x, w = matrix(5, 33) / 1e5, matrix(33, 9)

  def loss(w):
    return jnp.sin(x @ w / 1e4).sum()

  rounded = decode(*encode(w, form))
  value, gradient = jax.value_and_grad(lambda w: loss(block_rounding.rounded(w, form)))(
    w
  )
  expected_value, expected = jax.value_and_grad(loss)(rounded)
  assert value == expected_value != loss(w)
  np.testing.assert_array_equal(gradient, expected)


@pytest.mark.parametrize(
  'options, message',
  [(('int4', 8), "dtype='int4' must be one of int8"), (('int8', 0), 'block=0 must')],
)
def test_other_formats_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    BlockFormat(*options)


@pytest.mark.parametrize('dtype', ['int8', 'float8_e4m3fn'])
def test_qwix_reads_and_makes_the_same(dtype):
  """It multiplies by our codes as we do, and its own are a step away at most.

  It divides by 127.5, where the largest code is 127, and its scales are float32.
  """
  qwix = pytest.importorskip('qwix', reason='qwix is not installed here')
  x, form = matrix(64, 9), BlockFormat(dtype, 16)
  codes, scales = encode(x, form)
  ours = qwix.QArray(qvalue=codes, scale=scales.astype(jnp.float32))
  np.testing.assert_array_equal(qwix.dequantize(ours), decode(codes, scales))
  rows = matrix(5, 64)
  np.testing.assert_allclose(
    qwix.dot_general(rows, ours, (((1,), (0,)), ((), ()))),
    rows @ decode(codes, scales),
    rtol=1e-4,
    atol=1e-2,
  )
  theirs = qwix.quantize(x, dtype, channelwise_axes=(1,), tiled_axes={0: 16})
  ratio = np.asarray(theirs.scale / scales.astype(jnp.float32))
  bound = LARGEST[dtype] / (127.5 if dtype == 'int8' else 448)
  is_used = np.abs(np.asarray(x)).reshape(4, 16, 9).max(1) > 0
  np.testing.assert_allclose(ratio[is_used], bound, rtol=2**-8)
  step = np.repeat(np.asarray(theirs.scale), 16, axis=0)
  if dtype == 'float8_e4m3fn':  # of which codes are up to 32 apart
    step = np.maximum(step, np.abs(np.asarray(x)) / 8)
  difference = np.abs(np.asarray(qwix.dequantize(theirs) - decode(codes, scales)))
  assert (difference <= 1.01 * step).all()
