"""Attention runs over whole sequences, by the best kernel, or over a cache in chunks.

`H` query heads share `K` key-value heads; H is a multiple of K.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.dispatch import REFERENCE, Candidate, choose, platform_of

NEGATIVE = -1e30  # finite, so that a fully masked row gives numbers, not NaN
SHORTEST = 32  # minimum queries per span, if the sequence fits in one block


def attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
  *,
  prefix_ids: jax.Array | None = None,
  positions: jax.Array | None = None,
  key_ends: jax.Array | None = None,
  sinks: jax.Array | None = None,
  window: int = 0,
  softcap: float = 0.0,
  scale: float | None = None,
  row_segments: int = 0,
  kernels: str = 'auto',
  platform: str | None = None,
  shard: Callable[..., Callable[..., jax.Array]] | None = None,
) -> jax.Array:
  """Computes causal attention within segments, by the best kernel for the platform.

  Args:
    q: Queries `[B, T, H, d]`.
    k: Keys `[B, T, K, d]`.
    v: Values `[B, T, K, e]`, e at most d.
    segment_ids: Segment of each token, `[B, T]` int32; 0 is padding, whose output is
      undefined. A token attends to itself and to the earlier tokens of its segment.
    prefix_ids: Earlier segment of the row that a token also attends to, `[B, T]` int32;
      0 for none.
    positions: Position of each token in its sequence, `[B, T]` int32. Read only with a
      window, beside `prefix_ids` or `key_ends`; otherwise each segment is a whole
      sequence.
    key_ends: First column whose query no longer attends to each key, `[B, T]` int32. It
      replaces segments: a query attends to all earlier keys that end behind it. Such
      rows are trees, each token before its descendants. Only the reference takes it.
    sinks: Attention sinks `[H]`: an extra score per head, whose softmax weight goes to
      no value. None for none.
    window: Maximum number of keys that a query attends to, including its own; 0 for
      all.
    softcap: Soft cap on scores: a score s becomes softcap · tanh(s / softcap). 0 for
      none.
    scale: Factor on the products of queries and keys; None for d^−½.
    row_segments: The most segments of a row, which then begin in its first column, lie
      side by side and have the padding behind them. Segments with the same
      `prefix_ids` then follow each other, in the order of their prefixes. 0 if nothing
      is known of rows. On GPUs it saves a mask.
    kernels: As in `kernels.dispatch`.
    platform: As in `kernels.dispatch`.
    shard: Wraps a function so that each device runs it on its own shards:
      `(function, inputs, output) -> function`. `inputs` and `output` name the axes of
      the arrays; None is an axis that is not sharded. None if there is only one device.

  Returns:
    Output `[B, T, H, e]`.
  """
  platform = platform_of(platform)
  rules: dict[str, Any] = {'window': window, 'softcap': softcap, 'scale': scale}
  rules = {name: value for name, value in rules.items() if value}
  rows, heads = ('batch', None), ('heads',)
  extra = {'prefix_ids': (prefix_ids, rows), 'sinks': (sinks, heads)}
  if window and (prefix_ids is not None or key_ends is not None):
    extra['positions'] = positions, rows
  extra['key_ends'] = key_ends, rows
  extra = {name: pair for name, pair in extra.items() if pair[0] is not None}
  candidates: dict[str, Any] = {}
  if platform != 'cpu' and key_ends is None:
    from kernels import flash_attention  # for accelerators alone

    candidates = flash_attention.candidates(
      q,
      k,
      prefix_ids,
      platform=platform,
      row_segments=row_segments,
      sinks=sinks is not None,
      **rules,
    )
  elif platform == 'cpu' and kernels != REFERENCE:
    candidates['native'] = _native(q, k, v, shard, {*extra, *rules})
  candidates |= {REFERENCE: reference_attention}
  name = choose('attention', candidates, platform=platform, option=kernels)
  chosen = candidates[name]
  width = v.shape[-1]
  if name != REFERENCE and width < q.shape[-1]:  # kernels need values as wide as keys
    v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, q.shape[-1] - width)))

  def run(q, k, v, segment_ids, *arrays):
    extra_arrays = dict(zip(extra, arrays, strict=True))
    return chosen(q, k, v, segment_ids, **extra_arrays, **rules)

  if shard is not None and name != REFERENCE:
    queries, keys = ('batch', None, 'heads', None), ('batch', None, 'kv_heads', None)
    inputs = (queries, keys, keys, rows, *(names for _, names in extra.values()))
    run = shard(run, inputs, queries)
  out = run(q, k, v, segment_ids, *(array for array, _ in extra.values()))
  return out[..., :width] if width < out.shape[-1] else out


def skips_other_segments(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  kernels: str = 'auto',
  platform: str | None = None,
  shard: object = None,
  row_segments: int = 0,
  **options: object,
) -> bool:
  """Returns whether attention costs the same however sequences are packed into rows.

  Args:
    q: As for `attention`, like all others.
    k: As there.
    v: As there.
    kernels: As there.
    platform: As there.
    shard: As there.
    row_segments: As there. It makes no difference.
    **options: As there.
  """
  del row_segments
  if platform_of(platform) != 'cpu' or kernels == REFERENCE:
    return False
  asked = {name for name, x in options.items() if hasattr(x, 'shape') or x}
  return not isinstance(_native(q, k, v, shard, asked), str)


def _native(
  q: jax.Array, k: jax.Array, v: jax.Array, shard: object, asked: Collection[str]
) -> Candidate:
  """Returns the kernel for a CPU, or why it cannot do what is asked."""
  from kernels.native import segment_attention  # not for other platforms

  if shard is not None:
    return 'takes one device'
  return segment_attention.candidate(q, k, v, asked)


def reference_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
  prefix_ids: jax.Array | None = None,
  positions: jax.Array | None = None,
  sinks: jax.Array | None = None,
  key_ends: jax.Array | None = None,
  *,
  window: int = 0,
  softcap: float = 0.0,
  scale: float | None = None,
  block: int = 128,
  stretches: int = 4,
) -> jax.Array:
  """Computes `attention` in plain jnp.

  The queries are split into spans. Each span attends only to the keys up to its own
  end, starting at the first key inside its window. A sequence longer than `block` has
  at most `stretches` spans, each computed `block` queries at a time and recomputed in
  the backward pass. A shorter sequence has at most three spans, each of at least
  `SHORTEST` queries except the last.
  """
  length = q.shape[1]
  k, v, time = k.swapaxes(1, 2), v.swapaxes(1, 2), jnp.arange(length)
  places = None  # [B or 1, T]: the positions that windows are measured in
  is_plain = prefix_ids is None and key_ends is None
  if window:
    places = time[None] if is_plain else positions
    if places is None:
      beside = 'key_ends' if prefix_ids is None else 'prefix_ids'
      raise ValueError(f'a window beside {beside} needs the positions of tokens')
  seen = segment_ids[:, :, None]  # [B, T, 1 or 2]: segments that a query attends to
  if prefix_ids is not None:
    prefix = jnp.where(prefix_ids > 0, prefix_ids, segment_ids)
    seen = jnp.stack([segment_ids, prefix], axis=-1)
  if length <= block:
    run, size = _attend, max(SHORTEST, -(-length // 3))
  else:
    run = functools.partial(_stretch, block=block)
    size = max(block, -(-length // (stretches * block)) * block)
  rules = {'window': window, 'softcap': softcap, 'scale': scale}
  out = []
  for start in range(0, length, size):
    end = min(start + size, length)
    first = max(0, start + 1 - window) if window and is_plain else 0
    span, reach = slice(start, end), slice(first, end)
    queries = _Queries(q[:, span], seen[:, span], time[span], None)
    keys = _Keys(
      k[:, :, reach], v[:, :, reach], segment_ids[:, reach], time[reach], None
    )
    if places is not None:
      queries = queries._replace(places=places[:, span])
      keys = keys._replace(places=places[:, reach])
    if key_ends is not None:
      keys = keys._replace(ends=key_ends[:, reach])
    out.append(run(queries, keys, sinks, **rules))
  return jnp.concatenate(out, axis=1)


class _Queries(NamedTuple):
  """A span of queries from each row.

  Attributes:
    q: Queries `[B, t, H, d]`.
    seen: Segments that each query attends to, `[B, t, n]`.
    time: Column of each query in the row, `[t]`.
    places: Position of each query, `[B or 1, t]`; None without a window.
  """

  q: jax.Array
  seen: jax.Array
  time: jax.Array
  places: jax.Array | None


class _Keys(NamedTuple):
  """A span of keys and values from each row.

  Attributes:
    k: Keys `[B, K, T, d]`.
    v: Values `[B, K, T, e]`.
    ids: Segment of each key, `[B, T]`.
    time: Column of each key in the row, `[T]`.
    places: Position of each key, `[B or 1, T]`; None without a window.
    ends: Column from which on no query attends to each key, `[B, T]`; None if segments
      decide.
  """

  k: jax.Array
  v: jax.Array
  ids: jax.Array
  time: jax.Array
  places: jax.Array | None
  ends: jax.Array | None = None


def _stretch(
  queries: _Queries, keys: _Keys, sinks: jax.Array | None, *, block: int, **rules: Any
) -> jax.Array:
  """Computes `_attend` for `block` queries at a time."""

  @jax.checkpoint
  def attend(queries):
    return _attend(queries, keys, sinks, **rules)

  batch, length = queries.q.shape[:2]
  if length <= block:
    return attend(queries)
  chunks = -(-length // block)

  def split(x):  # [B, t, …] → [chunks, B, block, …]
    widths = [(0, 0), (0, chunks * block - length)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, widths, mode='edge')
    return x.reshape(x.shape[0], chunks, block, *x.shape[2:]).swapaxes(0, 1)

  def body(_, chunk):
    return None, attend(chunk._replace(time=chunk.time[0]))

  queries = queries._replace(time=queries.time[None])
  _, out = jax.lax.scan(body, None, jax.tree.map(split, queries))
  return out.swapaxes(0, 1).reshape(batch, -1, *out.shape[3:])[:, :length]


def _attend(
  queries: _Queries,
  keys: _Keys,
  sinks: jax.Array | None,
  *,
  window: int = 0,
  softcap: float = 0.0,
  scale: float | None = None,
) -> jax.Array:
  """Computes attention from all queries to all keys at once, `[B, t, H, e]`."""
  q, seen, time, _ = queries
  k, v = keys.k, keys.v
  batch, length, heads, dim = q.shape
  kv_heads = k.shape[1]
  # Stack the query heads of a key head along the length: fewer, larger matmuls.
  q = q * (dim**-0.5 if scale is None else scale)
  q = q.reshape(batch, length, kv_heads, -1, dim)
  q = q.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, dim)
  visible = time[:, None] >= keys.time
  if queries.places is not None and keys.places is not None:
    visible = visible & (queries.places[..., None] - keys.places[:, None] < window)
  if keys.ends is not None:
    in_segment = time[:, None] < keys.ends[:, None]
  else:
    in_segment = functools.reduce(
      jnp.logical_or,
      [seen[:, :, i, None] == keys.ids[:, None] for i in range(seen.shape[2])],
    )
  visible = visible & in_segment
  visible = jnp.tile(visible, (1, heads // kv_heads, 1))[:, None]
  scores = jnp.einsum('bkmd,bksd->bkms', q, k).astype(jnp.float32)
  if softcap:
    scores = softcap * jnp.tanh(scores / softcap)
  scores = jnp.where(visible, scores, NEGATIVE)
  top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
  if sinks is not None:
    sink = sinks.astype(jnp.float32).reshape(kv_heads, -1)
    sink = jnp.repeat(sink, length, axis=1)[None, :, :, None]
    top = jnp.maximum(top, jax.lax.stop_gradient(sink))
  weights = jnp.exp(scores - top)
  total = weights.sum(-1)
  if sinks is not None:
    total = total + jnp.exp(sink - top)[..., 0]
  out = jnp.einsum('bkms,bksd->bkmd', weights.astype(v.dtype), v)
  out = out / total[..., None].astype(out.dtype)
  return out.reshape(batch, heads, length, v.shape[-1]).swapaxes(1, 2)


def decode_attention(
  q: jax.Array,
  k_chunks: Sequence[jax.Array],
  v_chunks: Sequence[jax.Array],
  positions: jax.Array,
  limit: jax.Array | None,
  *,
  sinks: jax.Array | None = None,
  window: int = 0,
  softcap: float = 0.0,
  scale: float | None = None,
) -> jax.Array:
  """Computes attention from one query per slot to that slot's cache.

  Each query attends to its cache up to its own position. A running softmax combines the
  chunks. A fully masked chunk leaves the result unchanged bit for bit, so a slot
  depends neither on `limit` nor on other slots. With a window the cache is a ring
  buffer: position p is stored at p modulo the cache's length, which is at least the
  window.

  Args:
    q: Queries `[S, H, d]`.
    k_chunks: Keys of consecutive chunks of C positions, each `[S, K, d, C]`.
    v_chunks: Values of the chunks, each `[S, K, C, d]`; () if the keys are also the
      values.
    positions: Position of each query, `[S]` int32.
    limit: Scalar int32 > max(positions). Chunks that start at or after it are not read;
      None reads all of them.
    sinks: As in `attention`.
    window: As in `attention`.
    softcap: As in `attention`.
    scale: As in `attention`.

  Returns:
    Output `[S, H, d]` float32.
  """
  slots, heads, dim = q.shape
  kv_heads = k_chunks[0].shape[1]
  q = q.reshape(slots, kv_heads, heads // kv_heads, dim).astype(jnp.float32)
  q = q * (dim**-0.5 if scale is None else scale)
  ring = sum(k.shape[-1] for k in k_chunks)

  def attend(state, k, v, start):
    visible = visible_keys(start + jnp.arange(k.shape[-1]), positions, window, ring)
    return attend_chunk(state, q, k, v, visible[:, None, None], softcap)

  state, start = chunk_state(q, sinks), 0
  for k, v in zip(k_chunks, v_chunks or (None,) * len(k_chunks), strict=True):
    # The first one is always read: it holds the first position of every slot.
    if start == 0 or limit is None:
      state = attend(state, k, v, start)
    else:
      run = functools.partial(attend, start=start)
      state = jax.lax.cond(start < limit, run, lambda s, *_: s, state, k, v)
    start += k.shape[-1]
  _, total, out = state
  return (out / total[..., None]).reshape(slots, heads, dim)


def visible_keys(
  places: jax.Array, positions: jax.Array, window: int, ring: int
) -> jax.Array:
  """Returns the mask of the cached keys that a query attends to.

  Args:
    places: Index of each key in the cache, `[C]` int32.
    positions: Position of each query, `[…]` int32.
    window: Maximum number of keys that a query attends to; 0 for all.
    ring: Length of the cache. With a window, position p is stored at p modulo it.

  Returns:
    Mask `[…, C]` bool.
  """
  if not window:
    return places <= positions[..., None]
  age = jnp.mod(positions[..., None] - places, ring)
  return (age < window) & (age <= positions[..., None])


# Running softmax: the maximum score, the sum and the weighted sum of values so far.
ChunkState = tuple[jax.Array, jax.Array, jax.Array]


def chunk_state(q: jax.Array, sinks: jax.Array | None = None) -> ChunkState:
  """Returns the running softmax before the first chunk.

  Args:
    q: Queries `[S, K, g, d]` float32.
    sinks: Attention sinks `[K · n]`, as in `attention`. g is a multiple of n, and along
      g the n heads are the outer axis.
  """
  shape = q.shape[:-1]
  if sinks is None:
    return jnp.full(shape, NEGATIVE), jnp.zeros(shape), jnp.zeros(q.shape)
  sink = sinks.astype(jnp.float32).reshape(shape[1], -1)
  sink = jnp.repeat(sink, shape[2] // sink.shape[1], axis=1)
  return jnp.broadcast_to(sink, shape), jnp.ones(shape), jnp.zeros(q.shape)


def attend_chunk(
  state: ChunkState,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array | None,
  visible: jax.Array,
  softcap: float = 0.0,
) -> ChunkState:
  """Updates the running softmax with one more chunk of keys.

  Args:
    state: Running softmax so far.
    q: Scaled queries `[S, K, g, d]` float32.
    k: Keys `[S, K, d, C]`.
    v: Values `[S, K, C, d]`; None if the keys are also the values.
    visible: Bool mask of the keys to attend to, broadcast to `[S, K, g, C]`.
    softcap: As in `attention`.

  Returns:
    The updated running softmax.
  """
  top, total, out = state
  k = k.astype(jnp.float32)
  scores = jnp.einsum('skgd,skdt->skgt', q, k)
  if softcap:
    scores = softcap * jnp.tanh(scores / softcap)
  scores = jnp.where(visible, scores, -jnp.inf)
  new_top = jnp.maximum(top, scores.max(-1))
  weights = jnp.exp(scores - new_top[..., None])
  scale = jnp.exp(top - new_top)
  total = total * scale + weights.sum(-1)
  if v is None:
    mixed = jnp.einsum('skgt,skdt->skgd', weights, k)
  else:
    mixed = jnp.einsum('skgt,sktd->skgd', weights, v.astype(jnp.float32))
  out = out * scale[..., None] + mixed
  return new_top, total, out
