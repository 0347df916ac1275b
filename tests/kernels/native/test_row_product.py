"""The row product in panels, against numpy, alone and beside others."""

import concurrent.futures
import hashlib
import os
import pathlib
import platform
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kernels.native import library, row_product
from tests.marks import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER
DTYPES = ['float32', 'bfloat16']
ROWS = [*range(1, 10), 13, 64]
# One column; no whole panel; whole ones; several threads, and a rest.
SHAPES = [(1, 1), (7, 5), (33, 145), (64, 144), (577, 331)]
multiply = jax.jit(row_product.multiply)
reference = jax.jit(row_product.reference)


def draw(*shape, dtype='float32', seed=0):
  x = np.random.default_rng(seed).standard_normal(shape)
  return x.astype(ml_dtypes.bfloat16 if dtype == 'bfloat16' else dtype)


def assert_is_product(y, x, matrix):
  """Allows the error that a sum in float32 may have in any order."""
  x, matrix = (np.asarray(a).astype(np.float64) for a in (x, matrix))
  assert y.dtype == np.float32
  bound = 1.2e-7 * len(matrix) * (abs(x) @ abs(matrix))
  error = abs(np.asarray(y, np.float64) - x @ matrix)
  assert (error <= bound).all(), error.max()


def panels_of(matrix, width):
  """Restates the order of the panels, number by number."""
  pairs = 2 if matrix.dtype == ml_dtypes.bfloat16 else 1
  (inputs, columns), (d, n) = matrix.shape, np.indices(matrix.shape)
  shape = -(-columns // width), -(-inputs // pairs), width, pairs
  panels = np.zeros(shape, matrix.dtype)
  panels[n // width, d // pairs, n % width, d % pairs] = matrix
  return panels if pairs == 2 else panels[..., 0]


def call(target, x, panels, columns, *more, dtype='float32'):
  out = jax.ShapeDtypeStruct((len(x), columns), dtype)
  return jax.block_until_ready(jax.ffi.ffi_call(target, out)(x, panels, *more))


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_the_product_is_that_of_numpy(shape, dtype):
  matrix = draw(*shape, dtype=dtype)
  packed = row_product.pack(jnp.asarray(matrix))
  for rows in ROWS:
    x = draw(rows, shape[0], dtype=dtype, seed=rows)
    y = multiply(x, packed)
    assert y.shape == (rows, shape[1])
    assert_is_product(y, x, matrix)
    assert_is_product(reference(x, packed), x, matrix)


@pytest.mark.parametrize('dtype', DTYPES)
def test_x_has_any_axes_and_is_rounded(dtype):
  packed = row_product.pack(jnp.asarray(draw(33, 50, dtype=dtype)))
  x = draw(2, 3, 33)
  for part in (x, x[0], x[0, 0]):
    y = multiply(part, packed)
    assert y.shape == (*part.shape[:-1], 50)
    assert_is_product(y, part.astype(packed.panels.dtype), packed.unpack())


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_panels_hold_the_matrix(shape, dtype):
  matrix = draw(*shape, dtype=dtype)
  packed = row_product.pack(jnp.asarray(matrix))
  width = packed.panels.shape[2]
  np.testing.assert_array_equal(packed.panels, panels_of(matrix, width))
  np.testing.assert_array_equal(packed.unpack(), matrix)
  ids = np.random.default_rng(0).integers(0, shape[1], (2, 9)).astype(np.int32)
  for some in (ids, ids[0], ids[0, 0]):
    found = packed.columns(jnp.asarray(some))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, matrix.T[some])


def test_other_types_have_no_panels():
  with pytest.raises(TypeError, match='in float32 or bfloat16, not float16'):
    row_product.pack(jnp.zeros((2, 2), jnp.float16))


@pytest.mark.parametrize('dtype', DTYPES)
def test_a_row_has_the_bits_that_it_has_alone(dtype):
  packed = row_product.pack(jnp.asarray(draw(577, 331, dtype=dtype)))
  x = draw(64, 577, dtype=dtype)
  alone = np.concatenate([multiply(row, packed) for row in x[:, None]])
  for rows in ROWS:
    np.testing.assert_array_equal(multiply(x[-rows:], packed), alone[-rows:])


PRODUCTS = """
import os, sys
os.sched_setaffinity(0, set(map(int, sys.argv[1:])))
from tests.kernels.native import test_row_product
print(test_row_product.digest())
"""


def digest():
  """The digest of products that several threads compute, if there are several."""
  found = hashlib.sha256()
  for dtype in DTYPES:
    packed = row_product.pack(jnp.asarray(draw(577, 2003, dtype=dtype)))
    for rows in (1, 5, 13):
      for _ in range(5):
        y = multiply(draw(rows, 577, dtype=dtype), packed)
        found.update(np.asarray(y).tobytes())
  return found.hexdigest()


def test_bits_do_not_depend_on_the_number_of_threads():
  processors = sorted(os.sched_getaffinity(0))[:2]
  if len(processors) < 2:
    pytest.skip('has one processor')

  def digest_on(*processors):
    command = [sys.executable, '-c', PRODUCTS, *map(str, processors)]
    return subprocess.check_output(command, text=True, timeout=120).strip()

  assert digest_on(processors[0]) == digest_on(*processors) == digest()


def test_products_at_the_same_time_do_not_mix():
  cases = [
    (
      draw(rows, 577, dtype=dtype),
      row_product.pack(jnp.asarray(draw(577, 999 + rows, dtype=dtype))),
    )
    for rows, dtype in ((3, 'float32'), (8, 'bfloat16'))
  ]
  expected = [np.asarray(multiply(*case)) for case in cases]
  end = time.monotonic() + 2

  def repeat(i):
    count = 0
    while count < 300 and time.monotonic() < end:
      np.testing.assert_array_equal(multiply(*cases[i]), expected[i])
      count += 1
    return count

  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    counts = list(pool.map(repeat, range(2)))
  assert min(counts) > 5


@pytest.mark.skipif(platform.machine() != 'x86_64', reason='is not x86_64')
@pytest.mark.parametrize(
  'processor, needs, panel_columns',
  [
    ('x86-64', set(), 24),
    ('x86-64-v3', {'avx2', 'fma', 'bmi2'}, 24),
    ('x86-64-v4', {'avx512f', 'avx512bw', 'avx512cd', 'avx512dq', 'avx512vl'}, 48),
  ],
)
def test_older_processors_compute_the_same(
  processor, needs, panel_columns, monkeypatch, tmp_path
):
  flags = pathlib.Path('/proc/cpuinfo').read_text().split()
  if missing := needs - set(flags):
    pytest.skip(f'has no {", ".join(sorted(missing))}')
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  target = f'{row_product.TARGET}_{processor}'
  width = library.register(processor, f'_{processor}').panel_columns
  assert width == panel_columns
  for dtype in DTYPES:
    for inputs, columns in SHAPES:
      inputs += inputs % 2  # `multiply` pads
      matrix = draw(inputs, columns, dtype=dtype)
      x = draw(13, inputs, dtype=dtype)
      panels = panels_of(matrix, width)
      alone = [call(target, row, panels, columns)[0] for row in x[:, None]]
      for rows in (1, 2, 3, 4, 7, 13):
        y = call(target, x[:rows], panels, columns)
        assert_is_product(y, x[:rows], matrix)
        np.testing.assert_array_equal(y, alone[:rows])


def misfits():
  """Arguments, columns and the type of the result, none of which fit together."""
  width = row_product.pack(jnp.zeros((2, 1))).panels.shape[2]
  x, panels = np.zeros((3, 8), np.float32), np.zeros((2, 8, width), np.float32)
  x2, pairs = (
    x.astype(ml_dtypes.bfloat16),
    np.zeros((2, 4, width, 2), ml_dtypes.bfloat16),
  )
  columns = width + 1
  yield 'fewer inputs', (x[:, :7], panels, columns), {}
  yield 'fewer inputs, in pairs', (x2[:, :6], pairs, columns), {}
  yield 'fewer columns', (x, panels, width), {}
  yield 'more columns', (x, panels, 2 * width + 1), {}
  yield 'narrower panels', (x, panels[..., 1:], columns), {}
  yield (
    'panels of a pair too many',
    (x2, np.zeros((2, 4, width, 3), x2.dtype), columns),
    {},
  )
  yield 'x in another type', (x2, panels, columns), {}
  yield 'panels in another type', (x, pairs, columns), {}
  yield (
    'both in a third type',
    (x.astype('float16'), panels.astype('float16'), columns),
    {},
  )
  yield 'a result in bfloat16', (x, panels, columns), {'dtype': 'bfloat16'}
  yield 'an axis more', (x[None], panels, columns), {}
  yield 'panels without their axis', (x, panels[0], columns), {}
  yield 'pairs without their axis', (x2, pairs[..., 0], columns), {}


def test_what_does_not_fit_together_is_refused():
  error = jax.errors.JaxRuntimeError
  for what, arguments, options in misfits():
    with pytest.raises(error, match='shapes or types do not fit together'):
      pytest.fail(f'{what}: {call(row_product.TARGET, *arguments, **options)}')
  x, panels, columns = next(misfits())[1]
  with pytest.raises(error, match='takes two arrays and returns one'):
    call(row_product.TARGET, x, panels, columns, x)


@pytest.mark.parametrize('home', ['tpu', 'gpu', 'cuda'])
def test_it_is_for_cpus(home):
  name = 'gpu' if home == 'cuda' else home
  assert row_product.obstacle(home) == f'is for cpu, not {name}'


def test_it_is_not_taken_where_plain_jnp_is_asked_for():
  assert row_product.obstacle('cpu', kernels='reference') == 'not asked for'
  with pytest.raises(ValueError, match="kernels='fast' is not one of"):
    row_product.obstacle('cpu', kernels='fast')
