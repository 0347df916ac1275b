"""One pass over logits, against the statistics of `softmax_stats` in plain jnp."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.native import library, row_softmax
from kernels.softmax_stats import (
  NUM_COLUMNS,
  SoftmaxStats,
  StatsKind,
  backward_stats,
  block_stats,
  unpack_columns,
)
from tests.marks import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER
KIND = StatsKind(tempered=True, moments=True)


def keep(logits, targets, inverse):
  """The statistics and weights of given logits, whatever they are products of."""
  library.widths()
  shapes = [logits.shape, (len(logits), NUM_COLUMNS)]
  call = jax.ffi.ffi_call(
    row_softmax.TARGET,
    [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
    input_output_aliases={0: 0},
  )
  weights, stats = jax.jit(call)(jnp.asarray(logits), targets, jnp.float32(inverse))
  return SoftmaxStats(*unpack_columns(stats)), np.asarray(weights)


def draw(rows, vocab, scale=3.0):
  rng = np.random.default_rng(0)
  logits = scale * rng.standard_normal((rows, vocab), np.float32)
  targets = rng.integers(0, vocab, rows).astype(np.int32)
  targets[0] = -1
  return logits, targets


@pytest.mark.parametrize('inverse', [1.0, 1.25, 20.0])
@pytest.mark.parametrize('shape', [(1, 1), (3, 5), (7, 16), (5, 300), (90, 1031)])
def test_statistics_and_softmax_equal_the_plain_ones(shape, inverse):
  logits, targets = draw(*shape)
  stats, weights = keep(logits, targets, inverse)
  hit = np.arange(shape[1]) == targets[:, None]
  wanted = block_stats(
    jnp.asarray(logits), jnp.asarray(hit), jnp.float32(inverse), KIND
  )
  for name, x, y in zip(stats._fields, stats, wanted, strict=True):
    np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-5, err_msg=name)
  np.testing.assert_array_equal(stats.top, logits.max(1, keepdims=True))
  d = (logits.astype(float) - logits.max(1, keepdims=True)) * inverse
  np.testing.assert_allclose(weights, np.exp(d), rtol=3e-6 * inverse, atol=1e-37)


def test_the_exponential_is_right_to_the_last_bits():
  d = np.linspace(0, -86.9, 200_001, dtype=np.float32)[None]
  _, weights = keep(d, np.zeros(1, np.int32), 1.0)
  error = np.abs(weights.astype(float) / np.exp(d.astype(float)) - 1)
  assert error.max() < 2e-7


def test_masked_and_far_logits_weigh_nothing():
  logits, targets = draw(4, 40)
  logits[:, 7:30] = -1e30
  logits[:, 30:] -= 200
  stats, weights = keep(logits, targets, 1.0)
  assert not weights[:, 7:].any()
  alone, _ = keep(logits[:, :7].copy(), np.minimum(targets, 6), 1.0)
  np.testing.assert_allclose(stats.mean, alone.mean, rtol=1e-6)


def test_not_a_number_is_not_hidden():
  logits, targets = draw(4, 40)
  logits[2, 3] = np.nan
  stats, weights = keep(logits, targets, 1.0)
  assert np.isnan(stats.total[2, 0]) and np.isnan(weights[2, 3])
  assert np.isfinite(np.delete(weights, 2, axis=0)).all()


def test_a_row_has_the_same_bits_alone():
  logits, targets = draw(90, 1031)
  stats, weights = keep(logits, targets, 0.7)
  own_stats, own_weights = keep(logits[50:51], targets[50:51], 0.7)
  np.testing.assert_array_equal(weights[50:51], own_weights)
  jax.tree.map(
    lambda x, y: np.testing.assert_array_equal(x[50:51], y), stats, own_stats
  )


def test_states_and_table_are_multiplied_first():
  rng = np.random.default_rng(0)
  hidden, table = (rng.standard_normal((n, 8), np.float32) for n in (6, 30))
  targets = np.arange(6, dtype=np.int32)
  run = functools.partial(row_softmax.keep_softmax, kind=KIND)
  stats, kept = jax.jit(run)(hidden, table, targets, jnp.float32(1))
  wanted, weights = keep(hidden @ table.T, targets, 1.0)
  np.testing.assert_allclose(kept.weights, weights, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(stats.chosen, wanted.chosen, rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(kept.top, stats.top)


def misfits():
  """Arguments and shapes of results that do not fit together."""
  logits, targets = draw(3, 5)
  one, outs = np.float32(1), [(3, 5), (3, 8)]
  return {
    'targets': ((logits, targets[:2], one), outs),
    'type of targets': ((logits, targets.astype(np.uint32), one), outs),
    'temperature': ((logits, targets, np.ones(3, np.float32)), outs),
    'type': ((logits.astype('bfloat16'), targets, one), outs),
    'statistics': ((logits, targets, one), [(3, 5), (3, 7)]),
    'number': ((logits, targets), outs),
  }


@pytest.mark.parametrize('name', misfits())
def test_arrays_that_do_not_fit_are_refused(name):
  library.widths()
  arguments, shapes = misfits()[name]
  out = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  with pytest.raises(jax.errors.JaxRuntimeError, match='jaxrl_keep_softmax'):
    jax.block_until_ready(
      jax.jit(jax.ffi.ffi_call(row_softmax.TARGET, out))(*arguments)
    )


@pytest.mark.parametrize('vocab', [5, 1024, 2500, 4096])
def test_gradients_of_the_table_are_computed_in_blocks(vocab):
  rng = np.random.default_rng(1)
  hidden, table = rng.standard_normal((6, 8)), rng.standard_normal((vocab, 8))
  hidden, table = jnp.asarray(hidden, jnp.float32), jnp.asarray(table, jnp.float32)
  targets, inverse = rng.integers(0, vocab, 6).astype(np.int32), jnp.float32(1.25)
  arrays = hidden, table, targets, inverse
  stats, kept = row_softmax.keep_softmax(*arrays, kind=KIND)
  of, _ = backward_stats(stats, inverse, (jnp.arange(1.0, 7), *2 * [jnp.zeros(6)]))
  options = {'chosen': stats.chosen, 'dtypes': 2 * [jnp.float32]}
  grads = functools.partial(row_softmax.kept_gradients, *arrays, **options)

  def log_probs(hidden, table):
    all_ = jax.nn.log_softmax(hidden @ table.T * inverse)
    return all_[jnp.arange(6), targets] @ jnp.arange(1.0, 7)

  wanted = jax.grad(log_probs, (0, 1))(hidden, table)
  for x, y in zip(grads(of, kept), wanted, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
  products = re.findall(
    r'f32\[(\d+),8\] = dot_general', str(jax.make_jaxpr(grads)(of, kept))
  )
  assert max(map(int, products)) <= 1024 and len(products) == 2


def test_blocks_make_the_whole_product():
  rng = np.random.default_rng(1)
  weights, rows = rng.random((70, 3000), np.float32), rng.random((70, 32), np.float32)
  whole = jax.jit(lambda w, x: jnp.dot(w.T, x, precision='highest'))(weights, rows)
  blocks = jax.jit(row_softmax._product_of_table)(weights, rows)
  np.testing.assert_allclose(blocks, whole, rtol=1e-6)
