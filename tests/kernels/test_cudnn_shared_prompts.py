"""cuDNN for shared prompts against plain attention, as JAX documents packed rows.

The library itself needs a GPU. Here plain jnp stands for it, which writes NaN, and not
0, wherever cuDNN writes nothing.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import cudnn_attention, cudnn_shared_prompts
from kernels.attention import reference_attention
from tests.kernels.test_flash_attention import SHAPES, inputs, prefixed
from tests.marks import slow

REAL = cudnn_attention.library()
KINDS = REAL.MaskType


def joined(lengths, starts, row_size):
  """Segments of all rows on end, by what this jax tells cuDNN: starts, lengths."""
  shape = (starts.shape[0], row_size, 1, 1)
  one = jnp.zeros(shape)
  rest = REAL._fix_seqlen_offsets(lengths, lengths, starts, starts, one, one)
  return rest[2].reshape(-1)[: lengths.size], rest[0].reshape(-1)


class PlainCudnn:
  """cuDNN's packed layout in plain jnp; no segment overlaps another."""

  MaskType, AttentionLayout = KINDS, REAL.AttentionLayout
  check_cudnn_version = staticmethod(lambda: 91000)

  def dot_product_attention(
    self,
    query,
    key,
    value,
    q_seqlen,
    kv_seqlen,
    q_offsets,
    kv_offsets,
    scale,
    mask_type,
    qkv_layout,
    return_residual=False,
  ):
    spans = (q_seqlen, q_offsets), (kv_seqlen, kv_offsets)
    out, stats, _ = self.each(query, key, value, spans, scale, mask_type)
    return (out, stats) if return_residual else out

  def each(self, q, k, v, spans, scale, mask_type, backward=None):
    rows, size, heads, dim = q.shape
    assert k.shape[2] == v.shape[2] and heads % k.shape[2] == 0
    flat = lambda x: x.reshape(rows * size, *x.shape[2:])  # noqa: E731
    many = lambda x: jnp.repeat(flat(x), heads // x.shape[2], axis=1)  # noqa: E731
    queries, keys, values = flat(q), many(k), many(v)
    token = jnp.arange(rows * size)

    def place(lengths, starts):  # of each token: its segment's number, or none
      at, count = joined(lengths, starts, size)
      inside = (token >= at[:, None]) & (token < (at + count)[:, None])
      number = jnp.argmax(inside, axis=0)
      return at, count, number, token - at[number], inside.any(0)

    q_at, q_len, q_segment, q_place, of_q = place(*spans[0])
    *_, k_segment, k_place, of_k = place(*spans[1])
    seen = of_q[:, None] & of_k & (q_segment[:, None] == k_segment)
    if mask_type == KINDS.PADDING_CAUSAL:  # from the first query and key on
      seen &= q_place[:, None] >= k_place
    scores = scale * jnp.einsum('thd,shd->hts', queries, keys)
    scores = jnp.where(seen, scores, -jnp.inf)
    norm = jax.nn.logsumexp(scores, axis=-1)
    at = jnp.minimum(q_at[:, None] + jnp.arange(size), rows * size - 1)
    inside = jnp.arange(size) < q_len[:, None]
    stats = jnp.where(inside[:, None], norm[:, at].swapaxes(0, 1), jnp.nan)
    if backward is not None:
      given, final, slope = backward
      norm = given[q_segment, :, jnp.clip(q_place, 0, size - 1)].T
    p = jnp.where(seen, jnp.exp(scores - norm[..., None]), 0)
    whole = lambda x: x.reshape(rows, size, *x.shape[1:])  # noqa: E731
    written = lambda x, where: jnp.where(where[:, None, None], x, jnp.nan)  # noqa: E731
    out = whole(written(jnp.einsum('hts,shd->thd', p, values), of_q))
    if backward is None:
      return out, stats, ()
    slope = jnp.where(of_q[:, None, None], flat(slope), 0)
    dp = jnp.einsum('thd,shd->hts', slope, values)
    ds = p * (dp - jnp.einsum('thd,thd->ht', slope, flat(final))[..., None]) * scale
    few = lambda x: x.reshape(rows * size, k.shape[2], -1, dim).sum(2)  # noqa: E731
    dq = jnp.einsum('hts,shd->thd', ds, keys)
    dk = few(jnp.einsum('hts,thd->shd', ds, queries))
    dv = few(jnp.einsum('hts,thd->shd', p, slope))
    grads = written(dq, of_q), written(dk, of_k), written(dv, of_k)
    return out, stats, tuple(map(whole, grads))

  def _dot_product_attention_bwd_rule(
    self,
    scale,
    seed,
    dropout_rate,
    variadic_args,
    mask_type,
    layout,
    sliding_window_length,
    is_training,
    return_residual,
    res,
    grad_output,
  ):
    q, k, v, bias, q_len, k_len, q_at, k_at, *tables, stats, out = res
    assert not (bias.size or return_residual or dropout_rate or sliding_window_length)
    assert len(tables) == 2 and not any(variadic_args) and layout == 0
    spans, backward = ((q_len, q_at), (k_len, k_at)), (stats, out, grad_output)
    grads = self.each(q, k, v, spans, scale, mask_type, backward)[2]
    return *grads, *(None,) * 7


@pytest.fixture
def plain_cudnn(monkeypatch):
  monkeypatch.setattr(cudnn_attention, 'library', PlainCudnn)


def value_and_gradient(function, arrays, ids, prefix):
  """Of what tokens get: that of padding is undefined."""
  *args, weights = arrays

  def total(q, k, v):
    out = jnp.where((ids > 0)[..., None, None], function(q, k, v, ids, prefix), 0)
    return (out * weights).sum(), out

  run = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))
  (_, out), grads = run(*args)
  return out, *grads


def turns(length):
  """A prompt that two rows of two segments read: only their first segments do."""
  spans = [50, 1, 40, 20, 30, length - 141]
  ids = np.repeat([1, 2, 3, 4, 5, 0], spans)
  prefix = np.repeat([0, 1, 0, 1, 0, 0], spans)
  rows = np.stack([ids, np.zeros_like(ids)]), np.stack([prefix, np.zeros_like(ids)])
  return [jnp.asarray(x, jnp.int32) for x in rows]


@pytest.mark.parametrize('scale', [None, slow(0.3)])
@pytest.mark.parametrize('rows', [prefixed, turns])
def test_value_and_gradient_equal_the_plain_ones(plain_cudnn, rows, scale):
  shape = SHAPES[0][0], 4, 2, 16
  arrays, _ = inputs(*shape, jnp.float32)
  ids, prefix = rows(shape[0])
  run = functools.partial(
    cudnn_shared_prompts.shared_prompts, row_segments=6, scale=scale
  )
  actual = value_and_gradient(run, arrays, ids, prefix)
  plain = functools.partial(reference_attention, scale=scale)
  expected = value_and_gradient(
    lambda q, k, v, ids, prefix: plain(q, k, v, ids, prefix_ids=prefix),
    arrays,
    ids,
    prefix,
  )
  for a, b in zip(actual, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


def test_spans_of_prompts():
  ids = jnp.array([[1, 1, 2, 3, 4, 4, 5, 0], [1, 2, 2, 3, 3, 4, 0, 0], [1] * 8])
  prefix = jnp.array([[0, 0, 1, 1, 0, 0, 4, 0], [0, 0, 0, 2, 2, 2, 0, 0], [0] * 8])
  spans = cudnn_shared_prompts.prompt_spans(ids, prefix, 3)
  assert spans.q_starts.tolist() == [[2, 6, -1, -1], [3, -1, -1, -1], [-1] * 4]
  assert spans.q_lengths.tolist() == [[2, 1, -1], [3, -1, -1], [-1] * 3]
  assert spans.k_starts.tolist() == [[0, 4, -1, -1], [1, -1, -1, -1], [-1] * 4]
  assert spans.k_lengths.tolist() == [[2, 2, -1], [2, -1, -1], [-1] * 3]


def test_logsumexps_come_back_to_their_tokens():
  ids = jnp.array([[1, 1, 2, 3, 3, 3], [1, 1, 1, 1, 0, 0]])
  one = cudnn_attention.segment_spans(ids, 4)
  spans = cudnn_shared_prompts.Spans(*one, *one)
  norm = jnp.arange(2 * 6 * 3.0).reshape(2, 6, 3)
  stats = cudnn_shared_prompts.logsumexps_of_segments(norm, spans)
  assert stats.shape == (8, 3, 6)
  # The fourth segment of all is the first of the second row.
  np.testing.assert_array_equal(stats[3, :, :4], norm[1, :4].T)
  back = cudnn_shared_prompts.logsumexps_of_tokens(stats, spans, 6)
  np.testing.assert_array_equal(back, norm)


def test_this_jax_has_the_private_functions(monkeypatch):
  assert cudnn_shared_prompts.obstacle() == ''
  known = [*inspect.signature(REAL._dot_product_attention_bwd_rule).parameters]
  assert {'res', 'grad_output', 'return_residual'} <= {*known}
  monkeypatch.setattr(REAL, '_dot_product_attention_bwd_rule', lambda res: None)
  cudnn_shared_prompts.obstacle.cache_clear()
  try:
    assert 'not in this jax' in cudnn_shared_prompts.obstacle()
  finally:
    cudnn_shared_prompts.obstacle.cache_clear()


def test_which_rows_take_this_way(monkeypatch):
  monkeypatch.setattr(cudnn_attention, 'trace_error', lambda *args, **options: '')
  q, k = (jax.ShapeDtypeStruct((1, 256, n, 64), 'bfloat16') for n in (4, 2))
  candidates = functools.partial(cudnn_shared_prompts.candidates, q, k)
  assert callable(candidates(row_segments=4)['cudnn_shared_prompts'])
  for rows, why in (
    ({}, 'how many segments'),
    ({'row_segments': 4, 'window': 8}, 'window'),
    ({'row_segments': 257}, 'up to 256'),
  ):
    assert why in candidates(**rows)['cudnn_shared_prompts']


@pytest.mark.parametrize('kv_heads', [1, 2, 4])
def test_segments_of_keys_are_found_where_they_lie(kv_heads):
  """By the offsets that this jax computes: those of keys before 0.11.1 are wrong."""
  q = jnp.zeros((2, 8, 4, 16))
  k, _ = cudnn_attention.heads_for_packing(q, *(jnp.zeros((2, 8, kv_heads, 16)),) * 2)
  starts, lengths = cudnn_attention.segment_spans(jnp.array([[1] * 3 + [2] * 5] * 2), 2)
  fixed = REAL._fix_seqlen_offsets(lengths, lengths, starts, starts, q, k)
  for x, offsets in ((q, fixed[2]), (k, fixed[3])):
    first = offsets.reshape(-1)[:4] // (x.shape[2] * x.shape[3])
    assert first.tolist() == [0, 3, 8, 11]
