"""cuDNN attention to a token's own segment and to a shared prompt, without a mask.

cuDNN runs twice: causally within each segment, and from the tokens that share a prompt
to all of that prompt. Offsets tell it where each of them begins. The two outputs are
combined by their logsumexps, as a flash attention kernel combines blocks of keys. The
backward pass of each run gets the combined output and logsumexp, which makes its
gradients exact (section 3.1 of FlashAttention-2, arXiv 2307.08691).

JAX returns the logsumexp, but only its private backward pass accepts another one than
its own. `obstacle` checks that this version of JAX has that function.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels import cudnn_attention

NOTHING = -1e30  # the logsumexp of no keys
IGNORED = 1e30  # a logsumexp so large that every probability is 0
# The parameters of JAX's private backward pass, by whose names it is called. What is
# not in the first set came with later versions.
_BACKWARD = {
  *('scale', 'seed', 'dropout_rate', 'variadic_args', 'mask_type', 'layout'),
  *('sliding_window_length', 'return_residual', 'res', 'grad_output'),
}
_LATER = {'is_training', 'cudnn_version', 'score_mod'}


class Spans(NamedTuple):
  """Where the queries and keys of each run of cuDNN lie in their rows.

  Attributes:
    q_starts: First column of the queries of each pair, `[B, M + 1]` int32.
    q_lengths: Their number, `[B, M]` int32.
    k_starts: First column of the keys, `[B, M + 1]` int32.
    k_lengths: Their number, `[B, M]` int32. All are −1 where a row has no more pairs.
  """

  q_starts: jax.Array
  q_lengths: jax.Array
  k_starts: jax.Array
  k_lengths: jax.Array


def shared_prompts(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
  prefix_ids: jax.Array,
  *,
  row_segments: int,
  scale: float | None = None,
) -> jax.Array:
  """Computes attention in rows of segments, some of which read a shared prompt.

  Args:
    q: Queries `[B, T, H, d]`.
    k: Keys `[B, T, K, d]`.
    v: Values `[B, T, K, d]`.
    segment_ids: Segments `[B, T]` int32, side by side; 0 is padding, behind them.
    prefix_ids: The segment that each token also attends to, `[B, T]` int32, 0 for none.
      Along a row those that are not 0 never fall.
    row_segments: The most segments of a row, prompts among them, without the padding.
    scale: As in `kernels.attention.attention`.

  Returns:
    Output `[B, T, H, d]`.
  """
  scale = q.shape[-1] ** -0.5 if scale is None else scale
  k, v = cudnn_attention.heads_for_packing(q, k, v)
  return _attend(q, k, v, segment_ids, prefix_ids, row_segments, scale)


def prompt_spans(
  segment_ids: jax.Array, prefix_ids: jax.Array, most_prompts: int
) -> Spans:
  """Finds the prompts of rows, and for each the first and last token that reads it.

  Args:
    segment_ids: As in `shared_prompts`.
    prefix_ids: As in `shared_prompts`. Tokens between those that read a prompt may read
      none.
    most_prompts: The most prompts of a row, M.

  Returns:
    The spans.
  """
  rows, columns = segment_ids.shape
  here = jnp.arange(rows)[:, None]
  latest = jax.lax.cummax(prefix_ids, axis=1)
  is_first = (prefix_ids > 0) & (latest != jnp.pad(latest[:, :-1], ((0, 0), (1, 0))))
  number = jnp.cumsum(is_first, axis=1) - 1
  # Other tokens go beyond the end, where scatters drop them.
  place = jnp.where(prefix_ids > 0, number, most_prompts)
  column = jnp.broadcast_to(jnp.arange(columns, dtype=jnp.int32), place.shape)
  none = jnp.full((rows, most_prompts), -1, jnp.int32)
  prompt = none.at[here, place].max(prefix_ids, mode='drop')
  last = none.at[here, place].max(column, mode='drop')
  first = jnp.full_like(none, columns).at[here, place].min(column, mode='drop')
  is_prompt = segment_ids[:, None] == prompt[..., None]
  has = (prompt > 0) & is_prompt.any(-1)

  def starts(x: jax.Array) -> jax.Array:
    return jnp.pad(
      jnp.where(has, x, -1).astype(jnp.int32), ((0, 0), (0, 1)), constant_values=-1
    )

  def lengths(x: jax.Array) -> jax.Array:
    return jnp.where(has, x, -1).astype(jnp.int32)

  return Spans(
    starts(first),
    lengths(last - first + 1),
    starts(jnp.argmax(is_prompt, axis=-1)),
    lengths(is_prompt.sum(-1)),
  )


def logsumexps_of_tokens(stats: jax.Array, spans: Spans, columns: int) -> jax.Array:
  """Arranges cuDNN's logsumexps by token.

  cuDNN numbers the segments of all rows on end, and counts queries from the beginning
  of their segment.

  Args:
    stats: `[B · M, H, T]`.
    spans: Where the queries lie.
    columns: Columns of a row, T.

  Returns:
    `[B, T, H]`; undefined for tokens that are in no span.
  """
  starts = spans.q_starts[:, :-1]
  rows = len(starts)
  here = jnp.arange(rows)[:, None]
  is_start = jnp.zeros((rows, columns), jnp.int32)
  place = jnp.where(starts >= 0, starts, columns)
  is_start = is_start.at[here, place].add(1, mode='drop')
  number = jnp.maximum(jnp.cumsum(is_start, axis=1) - 1, 0)
  counts = (starts >= 0).sum(1)
  segment = (jnp.cumsum(counts) - counts)[:, None] + number
  offset = jnp.arange(columns) - jnp.take_along_axis(starts, number, axis=1)
  return stats[segment, :, jnp.clip(offset, 0, columns - 1)]


def logsumexps_of_segments(norm: jax.Array, spans: Spans) -> jax.Array:
  """Arranges logsumexps of tokens as cuDNN expects them; see `logsumexps_of_tokens`.

  Args:
    norm: `[B, T, H]`.
    spans: Where the queries lie.

  Returns:
    `[B · M, H, T]`; undefined behind the queries of each segment.
  """
  rows, columns, heads = norm.shape
  starts = spans.q_starts[:, :-1]
  flat = jnp.arange(rows)[:, None] * columns + starts
  (at,) = jnp.nonzero((starts >= 0).reshape(-1), size=starts.size, fill_value=0)
  token = flat.reshape(-1)[at][:, None] + jnp.arange(columns)
  token = jnp.clip(token, 0, rows * columns - 1)
  return norm.reshape(-1, heads)[token].swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attend(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
  prefix_ids: jax.Array,
  row_segments: int,
  scale: float,
) -> jax.Array:
  """Computes `shared_prompts`."""
  return _forward(q, k, v, segment_ids, prefix_ids, row_segments, scale)[0]


def _spans(
  segment_ids: jax.Array, prefix_ids: jax.Array, row_segments: int
) -> tuple[Spans, Spans]:
  """Returns the spans of own segments, and those of prompts."""
  # The padding is one more segment, so that cuDNN writes to all of a row.
  own = cudnn_attention.segment_spans(segment_ids, row_segments + 1)
  # A prompt and what reads it are two segments. For one pair JAX would not read spans.
  prompts = prompt_spans(segment_ids, prefix_ids, max(2, row_segments // 2))
  return Spans(*own, *own), prompts


def _forward(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
  prefix_ids: jax.Array,
  row_segments: int,
  scale: float,
) -> tuple[jax.Array, tuple]:
  library = cudnn_attention.library()

  def run(spans: Spans, mask_type: object) -> tuple[jax.Array, jax.Array]:
    out, stats = library.dot_product_attention(
      query=q,
      key=k,
      value=v,
      q_seqlen=spans.q_lengths,
      kv_seqlen=spans.k_lengths,
      q_offsets=spans.q_starts,
      kv_offsets=spans.k_starts,
      scale=scale,
      mask_type=mask_type,
      qkv_layout='BTNH',
      return_residual=True,
    )
    return out.astype(jnp.float32), logsumexps_of_tokens(stats, spans, q.shape[1])

  own, prompts = _spans(segment_ids, prefix_ids, row_segments)
  own_out, own_norm = run(own, library.MaskType.PADDING_CAUSAL)
  shared_out, shared_norm = run(prompts, library.MaskType.PADDING)
  reads = (prefix_ids > 0)[..., None]  # cuDNN writes nothing for the others
  shared_norm = jnp.where(reads, shared_norm, NOTHING)
  shared_out = jnp.where(reads[..., None], shared_out, 0)
  norm = jnp.logaddexp(own_norm, shared_norm)
  out = own_out * jnp.exp(own_norm - norm)[..., None]
  out += shared_out * jnp.exp(shared_norm - norm)[..., None]
  out = out.astype(q.dtype)
  return out, (q, k, v, segment_ids, prefix_ids, out, norm)


def _backward(
  row_segments: int, scale: float, kept: tuple, slope: jax.Array
) -> tuple[jax.Array | None, ...]:
  q, k, v, segment_ids, prefix_ids, out, norm = kept
  kinds = cudnn_attention.library().MaskType
  own, prompts = _spans(segment_ids, prefix_ids, row_segments)
  own_grads = _gradients(
    (q, k, v, out), own, norm, slope, scale=scale, mask_type=kinds.PADDING_CAUSAL
  )
  reads = (prefix_ids > 0)[..., None]
  shared_grads = _gradients(
    (q, k, v, out),
    prompts,
    jnp.where(reads, norm, IGNORED),
    jnp.where(reads[..., None], slope, 0),
    scale=scale,
    mask_type=kinds.PADDING,
  )
  starts, lengths = prompts.k_starts[:, :-1, None], prompts.k_lengths[..., None]
  columns = jnp.arange(q.shape[1])
  is_read = ((columns >= starts) & (columns < starts + lengths)).any(1)[..., None]
  # Elsewhere cuDNN writes nothing, and what lies in such memory could be NaN.
  written = reads, is_read, is_read
  summed = (
    (a.astype(jnp.float32) + jnp.where(w[..., None], b, 0)).astype(a.dtype)
    for a, b, w in zip(own_grads, shared_grads, written, strict=True)
  )
  return *summed, None, None


_attend.defvjp(_forward, _backward)


def _gradients(
  arrays: tuple[jax.Array, ...],
  spans: Spans,
  norm: jax.Array,
  slope: jax.Array,
  *,
  scale: float,
  mask_type: object,
) -> tuple[jax.Array, ...]:
  """Returns the gradients of queries, keys and values by one run of cuDNN.

  Args:
    arrays: q, k, v and the output.
    spans: Where the queries and keys of the run lie.
    norm: Logsumexps of the combined output, `[B, T, H]`.
    slope: Gradient of the output.
    scale: As in `shared_prompts`.
    mask_type: Of cuDNN: causal or not.
  """
  library = cudnn_attention.library()
  q, k, v, out = arrays
  unused = jnp.zeros(0, q.dtype)
  version = library.check_cudnn_version()
  # In the order of JAX's private function: no bias, and no tables of pages.
  res: tuple[Any, ...] = (q, k, v, unused, spans.q_lengths, spans.k_lengths)
  res += spans.q_starts, spans.k_starts, unused, unused
  run = library._dot_product_attention_bwd_rule
  parameters = inspect.signature(run).parameters
  res += ((),) if 'score_mod' in parameters else ()
  res += logsumexps_of_segments(norm, spans), out
  values = {
    'scale': scale,
    'seed': 42,  # of dropout, of which there is none
    'dropout_rate': 0.0,
    'variadic_args': (False, False),
    'mask_type': mask_type,
    'layout': library.AttentionLayout.BTNH.value,
    'sliding_window_length': None,
    'is_training': version,  # as this version of JAX names it
    'cudnn_version': version,
    'score_mod': None,
    'return_residual': False,
    'res': res,
    'grad_output': slope.astype(q.dtype),
  }
  return run(*(values[name] for name in parameters))[:3]


@functools.cache
def obstacle() -> str:
  """Returns why `shared_prompts` cannot be used with this jax; '' if it can."""
  if why := cudnn_attention.packing_obstacle():
    return why
  try:
    library = cudnn_attention.library()
    forward = inspect.signature(library.dot_product_attention).parameters.keys()
    names = inspect.signature(library._dot_product_attention_bwd_rule).parameters.keys()
    known = _BACKWARD <= names <= _BACKWARD | _LATER and 'return_residual' in forward
    known = known and hasattr(library.MaskType, 'PADDING')
    known = known and hasattr(library.AttentionLayout, 'BTNH')
  except (ImportError, AttributeError, TypeError, ValueError):
    known = False
  return '' if known else 'is not in this jax as this version knows it'


def candidates(
  q: jax.Array, k: jax.Array, *, row_segments: int = 0, window: int = 0
) -> dict[str, Callable[..., jax.Array] | str]:
  """Returns this implementation for rows with prefix_ids, or why it cannot be used.

  Args:
    q: Queries `[B, T, H, d]`.
    k: Keys `[B, T, K, d]`.
    row_segments: As in `kernels.attention.attention`.
    window: As there.
  """
  why = '' if q.dtype == jnp.bfloat16 else f'does not take {q.dtype.name}'
  why = why or cudnn_attention.segments_obstacle(row_segments, window) or obstacle()
  options = {'row_segments': row_segments}
  why = why or cudnn_attention.trace_error(_trace, q.shape, k.shape, **options)
  return {'cudnn_shared_prompts': why or functools.partial(shared_prompts, **options)}


def _trace(
  q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, *, row_segments: int
) -> jax.Array:
  """Computes attention whose segment_ids are prefix_ids too, to see if it works."""
  return shared_prompts(q, k, v, ids, ids, row_segments=row_segments)
