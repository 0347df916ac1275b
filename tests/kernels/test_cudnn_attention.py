"""cuDNN's ways against plain attention, as far as a machine without a GPU can tell."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import cudnn_attention
from kernels.attention import reference_attention
from tests.kernels.test_flash_attention import SHAPES, inputs, value_and_gradient
from tests.marks import slow


def assert_close(actual, expected):
  for a, b in zip(actual, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


def without_padding(function, ids):
  """What rows of one sequence get at tokens; nothing reads what padding gets."""

  def run(*args, **options):
    out = function(*args, **options)
    return jnp.where((ids > 0)[..., None, None], out, 0)

  return run


@pytest.mark.parametrize('rules', [{}, slow({'window': 70, 'scale': 0.3})])
def test_rows_of_one_sequence_need_no_mask(rules):
  arrays, ids = inputs(*SHAPES[0], jnp.float32)
  ids = jnp.where(jnp.arange(ids.shape[1]) < jnp.array([[150], [61]]), 1, 0)
  ways = (
    functools.partial(cudnn_attention.causal, implementation='xla'),
    reference_attention,
  )
  actual, expected = (
    value_and_gradient(
      without_padding(functools.partial(way, **rules), ids), arrays, ids
    )
    for way in ways
  )
  assert_close(actual, expected)


def spans_by_hand(row, most):
  starts, lengths = [0], []
  for column in range(1, len(row) + 1):
    is_last = column == len(row)
    if is_last or row[column] != row[column - 1]:
      lengths.append(column - starts[-1])
      starts += [] if is_last else [column]
  none = [-1] * (most - len(lengths))
  return [*starts, *none, -1], [*lengths, *none]


def test_spans_of_segments():
  rows = [[1, 1, 2, 3, 3, 3, 0, 0], [0] * 8, [1] * 8, [4, 4, 4, 5, 5, 5, 6, 6]]
  starts, lengths = cudnn_attention.segment_spans(jnp.array(rows), 4)
  for i, row in enumerate(rows):
    expected = spans_by_hand(row, 4)
    assert (starts[i].tolist(), lengths[i].tolist()) == expected
  draw = np.random.default_rng(0)
  row = np.repeat(np.arange(1, 9), draw.integers(1, 30, 8))
  starts, lengths = cudnn_attention.segment_spans(jnp.array(row)[None], 8)
  assert (starts[0].tolist(), lengths[0].tolist()) == spans_by_hand(row, 8)


def as_documented(
  query, key, value, q_seqlen, kv_seqlen, q_offsets, kv_offsets, **more
):
  """What JAX's documentation says of the packed layout, in plain jnp.

  A token that is in none of the segments gets NaN, because cuDNN does not write there.
  """
  assert more['mask_type'] == 'padding and causal' and more['qkv_layout'] == 'BTNH'
  columns = jnp.arange(query.shape[1])

  def inside(starts, lengths):  # [B, M, T]
    starts, lengths = starts[:, :-1, None], lengths[:, :, None]
    return (starts >= 0) & (columns >= starts) & (columns < starts + lengths)

  queries, keys = inside(q_offsets, q_seqlen), inside(kv_offsets, kv_seqlen)
  seen = (queries[:, :, :, None] & keys[:, :, None]).any(1)[:, None]
  out = jax.nn.dot_product_attention(
    query, key, value, mask=seen, is_causal=True, scale=more['scale']
  )
  return jnp.where(queries.any(1)[..., None, None], out, jnp.nan)


@pytest.mark.parametrize('scale', [None, slow(0.3)])
def test_packed_rows_tell_where_segments_lie(monkeypatch, scale):
  library = types.SimpleNamespace(
    dot_product_attention=as_documented,
    MaskType=types.SimpleNamespace(PADDING_CAUSAL='padding and causal'),
  )
  monkeypatch.setattr(cudnn_attention, 'library', lambda: library)
  arrays, ids = inputs(*SHAPES[0], jnp.float32)
  run = functools.partial(cudnn_attention.packed, row_segments=3, scale=scale)
  actual = value_and_gradient(run, arrays, ids)
  plain = functools.partial(reference_attention, scale=scale)
  assert_close(actual, value_and_gradient(plain, arrays, ids))


def test_this_jax_has_the_private_function():
  assert cudnn_attention.packing_obstacle() == ''


def without_offsets(query, key, value, q_seqlen, kv_seqlen, *, scale, mask_type):
  """A private function that lacks what packed rows need."""


@pytest.mark.parametrize('name', ['dot_product_attention', 'MaskType'])
def test_another_private_function_is_not_called(monkeypatch, name):
  replacement = without_offsets if name == 'dot_product_attention' else object()
  monkeypatch.setattr(cudnn_attention.library(), name, replacement)
  cudnn_attention.packing_obstacle.cache_clear()
  try:
    assert 'not in this jax' in cudnn_attention.packing_obstacle()
  finally:
    cudnn_attention.packing_obstacle.cache_clear()


def test_which_rows_take_which_way(monkeypatch):
  monkeypatch.setattr(cudnn_attention, 'trace_error', lambda *args, **options: '')

  def way(length=256, dtype='bfloat16', **rows):
    q, k = (jax.ShapeDtypeStruct((1, length, n, 64), dtype) for n in (4, 2))
    found = cudnn_attention.candidates(q, k, **rows)
    return next((name for name in found if not isinstance(found[name], str)), None)

  assert way(row_segments=1) == way(row_segments=1, window=8) == 'cudnn_causal'
  assert way(row_segments=2) == way(row_segments=256) == 'cudnn_packed'
  assert way(row_segments=1, length=16384) == 'cudnn_causal'
  for rows in (
    {},
    {'row_segments': 2, 'window': 8},
    {'row_segments': 257},
    {'row_segments': 1, 'has_prefix': True},
  ):
    assert way(**rows) == 'cudnn_masked'
    assert way(length=16384, **rows) is None
  assert way(row_segments=1, dtype='float32') is None


@pytest.mark.skipif(jax.default_backend() != 'cpu', reason='there may be cuDNN here')
def test_a_way_that_cannot_be_traced_here_says_why():
  q, k = (jax.ShapeDtypeStruct((1, 256, n, 64), 'bfloat16') for n in (4, 2))
  found = cudnn_attention.candidates(q, k, row_segments=1)
  assert found['cudnn_causal'].startswith('cannot be used: ')
