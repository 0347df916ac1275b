"""cuDNN attention runs whole rows on NVIDIA GPUs, without a mask where the rows allow.

Given a mask, cuDNN computes every pair of tokens, and takes more than twice as long as
without (https://github.com/jax-ml/jax/pull/35114). There are therefore four ways:

- `causal`, for rows of one sequence with padding behind. No token sees what lies after
  it, so the padding needs no mask.
- `packed`, for segments side by side. cuDNN is told where each one begins, and computes
  only pairs of tokens of the same segment. JAX offers this only in a private function,
  which `packing_obstacle` checks.
- `kernels.cudnn_shared_prompts`, for segments side by side that read shared prompts.
- `masked`, for everything else: windows in rows of several segments, and rows of which
  nothing is known.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

LONGEST_MASK = 8192  # longest sequence for which a [T, T] mask is materialized
MASK_MULTIPLE = 128  # masks of odd lengths are refused, and others read slowly
# Most segments of a row that cuDNN is told of. It reserves logsumexps for a whole row,
# and starts blocks for one, for each of them.
MOST_SEGMENTS = 256
KEY_HEADS_COUNT = 0, 11, 1  # the first version of JAX that counts heads of keys
# The arguments of the private function that `packed` gives.
_PACKED_ARGUMENTS = {
  *('query', 'key', 'value', 'q_seqlen', 'kv_seqlen', 'q_offsets', 'kv_offsets'),
  *('scale', 'mask_type', 'qkv_layout'),
}
Implementation = Literal['cudnn', 'xla']


def causal(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
  *,
  window: int = 0,
  scale: float | None = None,
  implementation: Implementation = 'cudnn',
) -> jax.Array:
  """Computes attention in rows that hold one sequence each, from the first column on.

  Args:
    q: Queries `[B, T, H, d]`.
    k: Keys `[B, T, K, d]`.
    v: Values `[B, T, K, d]`.
    segment_ids: Not read. Padding attends to the tokens before it, and nothing reads
      what it gets.
    window: As in `kernels.attention.attention`.
    scale: As there.
    implementation: Implementation in JAX: 'cudnn', or 'xla' for tests.

  Returns:
    Output `[B, T, H, d]`.
  """
  del segment_ids
  return jax.nn.dot_product_attention(
    q,
    k,
    v,
    scale=scale,
    is_causal=True,
    local_window_size=(window - 1, 0) if window else None,
    implementation=implementation,
  )


def packed(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
  *,
  row_segments: int,
  scale: float | None = None,
) -> jax.Array:
  """Computes attention in rows of several segments that lie side by side.

  Args:
    q: Queries `[B, T, H, d]`.
    k: Keys `[B, T, K, d]`.
    v: Values `[B, T, K, d]`.
    segment_ids: Segments `[B, T]` int32; 0 is padding, behind the segments.
    row_segments: The most segments of a row, without the padding.
    scale: As in `kernels.attention.attention`.

  Returns:
    Output `[B, T, H, d]`.
  """
  cudnn = library()
  k, v = heads_for_packing(q, k, v)
  # The padding is one more segment: cuDNN writes nothing where there is none, and what
  # lies in such memory could be NaN.
  starts, lengths = segment_spans(segment_ids, row_segments + 1)
  return cudnn.dot_product_attention(
    query=q,
    key=k,
    value=v,
    q_seqlen=lengths,
    kv_seqlen=lengths,
    q_offsets=starts,
    kv_offsets=starts,
    scale=q.shape[-1] ** -0.5 if scale is None else scale,
    mask_type=cudnn.MaskType.PADDING_CAUSAL,
    qkv_layout='BTNH',
  )


def heads_for_packing(
  q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns keys and values with heads as JAX needs them to find packed segments.

  Before 0.11.1, JAX computed where the keys of a segment lie as if they had as many
  heads as the queries. With such a version they get them.

  Args:
    q: Queries `[B, T, H, d]`.
    k: Keys `[B, T, K, d]`.
    v: Values `[B, T, K, d]`.

  Returns:
    Keys and values, `[B, T, K, d]` or `[B, T, H, d]`.
  """
  if jax.__version_info__ >= KEY_HEADS_COUNT:
    return k, v
  group = q.shape[2] // k.shape[2]
  return jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)


def segment_spans(
  segment_ids: jax.Array, most_segments: int
) -> tuple[jax.Array, jax.Array]:
  """Finds where the segments of rows begin and how long they are.

  Args:
    segment_ids: Segments `[B, T]` int32; equal ids lie side by side. Padding counts as
      a segment.
    most_segments: The most segments of a row, M. Further ones count as part of the
      last.

  Returns:
    The first column of each segment, `[B, M + 1]` int32, and its tokens, `[B, M]`
    int32; both −1 where a row has no more segments.
  """
  rows, columns = segment_ids.shape
  changes = segment_ids[:, 1:] != segment_ids[:, :-1]
  number = jnp.cumsum(jnp.pad(changes, ((0, 0), (1, 0))), axis=1)
  number = jnp.minimum(number, most_segments - 1)
  lengths = jnp.zeros((rows, most_segments), jnp.int32)
  lengths = lengths.at[jnp.arange(rows)[:, None], number].add(1)
  starts = jnp.cumsum(lengths, axis=1) - lengths
  starts = jnp.where(starts < columns, starts, -1)
  starts = jnp.pad(starts, ((0, 0), (0, 1)), constant_values=-1)
  return starts, jnp.where(lengths > 0, lengths, -1)


def masked(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
  prefix_ids: jax.Array | None = None,
  positions: jax.Array | None = None,
  *,
  window: int = 0,
  scale: float | None = None,
  implementation: Implementation = 'cudnn',
) -> jax.Array:
  """Computes attention with a mask `[B, 1, T, T]` for all heads, held in memory.

  Args:
    q: Queries `[B, T, H, d]`.
    k: Keys `[B, T, K, d]`.
    v: Values `[B, T, K, d]`.
    segment_ids: Segments `[B, T]` int32; 0 is padding.
    prefix_ids: Another segment that each token attends to, `[B, T]` int32, or None.
    positions: As in `kernels.attention.attention`.
    window: As there.
    scale: As there.
    implementation: Implementation in JAX: 'cudnn', or 'xla' for tests.

  Returns:
    Output `[B, T, H, d]`.
  """
  length = q.shape[1]
  # Only a window reads positions, and without prefix_ids a segment is one sequence.
  if positions is None:
    positions = jnp.broadcast_to(jnp.arange(length), segment_ids.shape)
  prefix_ids = segment_ids if prefix_ids is None else prefix_ids
  padding = -length % MASK_MULTIPLE
  if padding:
    arrays = q, k, v, segment_ids, prefix_ids, positions
    q, k, v, segment_ids, prefix_ids, positions = (
      jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2))) for x in arrays
    )
  keys = segment_ids[:, None]
  seen = segment_ids[..., None] == keys
  seen |= (prefix_ids[..., None] == keys) & (prefix_ids[..., None] > 0)
  if window:
    seen &= positions[..., None] - positions[:, None] < window
  out = jax.nn.dot_product_attention(
    q,
    k,
    v,
    mask=seen[:, None],
    scale=scale,
    is_causal=True,
    implementation=implementation,
  )
  return out[:, :length]


def decode(
  q: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  lengths: jax.Array,
  *,
  implementation: Implementation = 'cudnn',
) -> jax.Array:
  """Computes attention from one query per slot to the first positions of its cache.

  The result of a slot depends neither on other slots nor on the cache past its length.

  Args:
    q: Queries `[S, H, d]`.
    keys: Cached keys `[S, T, K, d]`.
    values: Cached values `[S, T, K, d]`.
    lengths: Positions that each slot attends to, from its first one on, `[S]` int32, at
      least 1.
    implementation: Implementation in JAX: 'cudnn', or 'xla' for tests.

  Returns:
    Output `[S, H, d]` float32.
  """
  out = jax.nn.dot_product_attention(
    q[:, None],
    keys,
    values,
    query_seq_lengths=jnp.ones_like(lengths),
    key_value_seq_lengths=lengths,
    implementation=implementation,
  )
  return out[:, 0].astype(jnp.float32)


def decode_obstacle(heads: int, kv_heads: int, head_dim: int, dtype: str) -> str:
  """Returns why `decode` cannot be used on the GPU here; '' if it can.

  Args:
    heads: Query heads H.
    kv_heads: Key-value heads K.
    head_dim: Dimension d of a head.
    dtype: Dtype of the cache.
  """
  if dtype != 'bfloat16':
    return f'does not take {dtype}'
  return trace_error(decode, (1, heads, head_dim), (1, 64, kv_heads, head_dim))


def candidates(
  q: jax.Array,
  k: jax.Array,
  *,
  has_prefix: bool = False,
  row_segments: int = 0,
  window: int = 0,
) -> dict[str, Callable[..., jax.Array] | str]:
  """Returns the ways of cuDNN, the fastest first.

  Args:
    q: Queries `[B, T, H, d]`.
    k: Keys `[B, T, K, d]`.
    has_prefix: Whether tokens also attend to another segment.
    row_segments: As in `kernels.attention.attention`.
    window: As there.

  Returns:
    The ways by name. A string in place of a function is the reason why that way cannot
    be taken.
  """
  why = '' if q.dtype == jnp.bfloat16 else f'does not take {q.dtype.name}'
  shapes = q.shape, k.shape
  unmasked = why or ('does not take prefix_ids' if has_prefix else '')
  one = '' if row_segments == 1 else 'is for rows of one segment'
  too_long = ''
  if q.shape[1] > LONGEST_MASK:
    too_long = f'would hold a mask for every two of {q.shape[1]} tokens'
  options = {'row_segments': row_segments}
  return {
    'cudnn_causal': (unmasked or one or trace_error(causal, *shapes) or causal),
    'cudnn_packed': (
      unmasked
      or segments_obstacle(row_segments, window)
      or packing_obstacle()
      or trace_error(packed, *shapes, **options)
      or functools.partial(packed, **options)
    ),
    'cudnn_masked': why or too_long or trace_error(masked, *shapes) or masked,
  }


def segments_obstacle(row_segments: int, window: int) -> str:
  """Returns why cuDNN is not told where so many segments lie; '' if it is.

  Args:
    row_segments: As in `kernels.attention.attention`.
    window: As there.
  """
  if not row_segments:
    return 'must know how many segments a row has'
  if window:
    return 'does not take window'
  if row_segments > MOST_SEGMENTS:
    return f'is for rows of up to {MOST_SEGMENTS} segments, not {row_segments}'
  return ''


@functools.cache
def packing_obstacle() -> str:
  """Returns why `packed` cannot be used with this jax; '' if it can."""
  try:
    function, kinds = library().dot_product_attention, library().MaskType
    parameters = inspect.signature(function).parameters.keys()
    known = parameters >= _PACKED_ARGUMENTS and hasattr(kinds, 'PADDING_CAUSAL')
  except (ImportError, AttributeError, TypeError, ValueError):
    known = False
  return '' if known else 'is not in this jax as this version knows it'


def library() -> Any:
  """Imports JAX's private module of cuDNN lazily: programs on CPU need none of it.

  JAX has no public way to tell cuDNN where segments lie. Where the module or what it
  has moves, `packing_obstacle` says so, and rows of segments take another way.
  """
  from jax._src.cudnn import fused_attention_stablehlo

  return fused_attention_stablehlo


@functools.cache
def trace_error(
  function: Callable[..., jax.Array],
  queries: tuple[int, ...],
  keys: tuple[int, ...],
  **options: int,
) -> str:
  """Returns why a way cannot be taken for shapes on the device here; '' if it can.

  Args:
    function: The way, as `(q, k, v, segment_ids, **options) -> output`.
    queries: Shape of the queries.
    keys: Shape of the keys.
    **options: Options of the way.
  """
  q, k = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (queries, keys))
  ids = jax.ShapeDtypeStruct(queries[: len(queries) - 2], jnp.int32)
  try:  # JAX checks cuDNN's version and the device at trace time
    jax.eval_shape(functools.partial(function, **options), q, k, k, ids)
  except Exception as error:  # the checks raise different classes
    return f'cannot be used: {error}'.splitlines()[0]
  return ''
