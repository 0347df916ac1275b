"""Attention over whole sequences, by the best kernel, and over a cache in chunks.

`H` query heads share `K` key-value heads, H a multiple of K.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from kernels import flash_attention
from kernels.dispatch import REFERENCE, choose, platform_of

NEGATIVE = -1e30  # finite, so that a fully masked row gives numbers, not NaN
SHORTEST = 32  # queries of a run, where a sequence is one block or less


def attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
  *,
  prefix_ids: jax.Array | None = None,
  kernels: str = 'auto',
  platform: str | None = None,
  shard: Callable[..., Callable[..., jax.Array]] | None = None,
) -> jax.Array:
  """Computes causal attention within segments, by the best kernel for the platform.

  Args:
    q: `[B, T, H, d]`.
    k: `[B, T, K, d]`.
    v: `[B, T, K, d]`.
    segment_ids: `[B, T]` int32; a token sees itself and the tokens before it in its own
      segment.
    prefix_ids: `[B, T]` int32, an earlier segment of the row that a token sees too; 0
      for none.
    kernels: As in `kernels.dispatch`.
    platform: As in `kernels.dispatch`.
    shard: `(function, inputs, output) -> function`, runs a function of arrays on every
      device's own part of them; inputs and output name the axes, None is whole. None
      where all is on one device.

  Returns:
    `[B, T, H, d]`.
  """
  platform = platform_of(platform)
  candidates = flash_attention.candidates(q, k, prefix_ids, platform=platform)
  candidates = candidates | {REFERENCE: reference_attention}
  name = choose('attention', candidates, platform=platform, asked=kernels)
  arrays = [q, k, v, segment_ids]
  if prefix_ids is not None:
    arrays.append(prefix_ids)
  run = candidates[name]
  assert callable(run)  # `choose` gives no other
  if shard is not None and name != REFERENCE:
    queries, keys = ('batch', None, 'heads', None), ('batch', None, 'kv_heads', None)
    inputs = (queries, keys, keys, *((('batch', None),) * (len(arrays) - 3)))
    run = shard(run, inputs, queries)
  return run(*arrays)


def reference_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
  prefix_ids: jax.Array | None = None,
  *,
  block: int = 128,
  stretches: int = 4,
) -> jax.Array:
  """Computes `attention` in plain jnp.

  Sequences are done in runs of queries, each against the keys up to its own end. Those
  longer than `block` in at most `stretches`, `block` queries at a time, computed anew
  in the backward pass; shorter ones in at most three, of at least `SHORTEST` but for
  the last.
  """
  length = q.shape[1]
  k, v, time = k.swapaxes(1, 2), v.swapaxes(1, 2), jnp.arange(length)
  seen = segment_ids[:, :, None]  # [B, T, 1 or 2]: the segments that a query sees
  if prefix_ids is not None:
    prefix = jnp.where(prefix_ids > 0, prefix_ids, segment_ids)
    seen = jnp.stack([segment_ids, prefix], axis=-1)
  if length <= block:
    run, size = _whole, max(SHORTEST, -(-length // 3))
  else:
    run = functools.partial(_stretch, block=block)
    size = max(block, -(-length // (stretches * block)) * block)
  out = []
  for start in range(0, length, size):
    end = min(start + size, length)
    span = slice(start, end)
    queries = q[:, span], seen[:, span], time[span]
    keys = k[:, :, :end], v[:, :, :end], segment_ids[:, :end]
    out.append(run(queries, keys))
  return jnp.concatenate(out, axis=1)


def _whole(queries: tuple, keys: tuple) -> jax.Array:
  """Queries (q, seen, time) against keys (k, v, ids), all at once."""
  q, seen, time = queries
  k, v, k_ids = keys
  return _attend(q, k, v, seen, k_ids, time)


def _stretch(queries: tuple, keys: tuple, block: int) -> jax.Array:
  """Queries (q, seen, time) against keys (k, v, ids), `block` queries at a time."""
  q, seen, time = queries
  k, v, k_ids = keys

  @jax.checkpoint
  def attend(q, seen, time):
    return _attend(q, k, v, seen, k_ids, time)

  batch, length = q.shape[:2]
  if length <= block:
    return attend(q, seen, time)
  chunks = -(-length // block)

  def split(x):  # [B, t, …] → [chunks, B, block, …]
    widths = [(0, 0), (0, chunks * block - length)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, widths, mode='edge')
    return x.reshape(x.shape[0], chunks, block, *x.shape[2:]).swapaxes(0, 1)

  def body(_, chunk):
    q, seen, time = chunk
    return None, attend(q, seen, time[0])

  _, out = jax.lax.scan(body, None, (split(q), split(seen), split(time[None])))
  return out.swapaxes(0, 1).reshape(batch, -1, *q.shape[2:])[:, :length]


def _attend(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  seen: jax.Array,
  k_ids: jax.Array,
  time: jax.Array,
) -> jax.Array:
  """Queries q `[B, t, H, d]` at places `time` `[t]`; k, v `[B, K, T, d]`.

  seen: `[B, t, n]` the segments that each query sees, of those of the keys `[B, T]`.
  """
  batch, length, heads, dim = q.shape
  kv_heads = k.shape[1]
  # Query heads of one key head are stacked along the length: few, larger products.
  q = (q * dim**-0.5).reshape(batch, length, kv_heads, -1, dim)
  q = q.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, dim)
  visible = time[:, None] >= jnp.arange(k.shape[2])
  in_segment = functools.reduce(
    jnp.logical_or,
    [seen[:, :, i, None] == k_ids[:, None] for i in range(seen.shape[2])],
  )
  visible = visible & in_segment
  visible = jnp.tile(visible, (1, heads // kv_heads, 1))[:, None]
  scores = jnp.einsum('bkmd,bksd->bkms', q, k).astype(jnp.float32)
  scores = jnp.where(visible, scores, NEGATIVE)
  top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
  weights = jnp.exp(scores - top)
  out = jnp.einsum('bkms,bksd->bkmd', weights.astype(v.dtype), v)
  out = out / weights.sum(-1)[..., None].astype(out.dtype)
  return out.reshape(batch, heads, length, dim).swapaxes(1, 2)


def decode_attention(
  q: jax.Array,
  k_chunks: Sequence[jax.Array],
  v_chunks: Sequence[jax.Array],
  positions: jax.Array,
  limit: jax.Array,
) -> jax.Array:
  """Attends from one query per row to its own cache, up to its own position.

  Chunks are combined by a running softmax, and a fully masked one changes no bit, so a
  row depends neither on `limit` nor on other rows.

  Args:
    q: `[S, H, d]`.
    k_chunks: Each `[S, K, d, C]`, the next C positions.
    v_chunks: Each `[S, K, C, d]`.
    positions: `[S]` int32.
    limit: A scalar int32 > max(positions); chunks from there on are not read.

  Returns:
    `[S, H, d]` float32.
  """
  slots, heads, dim = q.shape
  kv_heads = k_chunks[0].shape[1]
  q = q.reshape(slots, kv_heads, heads // kv_heads, dim).astype(jnp.float32)
  q = q * dim**-0.5

  def attend(state, k, v, start):
    visible = start + jnp.arange(k.shape[-1]) <= positions[:, None]
    return attend_chunk(state, q, k, v, visible[:, None, None])

  state, start = chunk_state(q), 0
  for k, v in zip(k_chunks, v_chunks, strict=True):
    if start == 0:  # holds every row's first position
      state = attend(state, k, v, 0)
    else:
      run = functools.partial(attend, start=start)
      state = jax.lax.cond(start < limit, run, lambda s, *_: s, state, k, v)
    start += k.shape[-1]
  _, total, out = state
  return (out / total[..., None]).reshape(slots, heads, dim)


# A running softmax: the largest score, the sum and the weighted sum of values so far.
ChunkState = tuple[jax.Array, jax.Array, jax.Array]


def chunk_state(q: jax.Array) -> ChunkState:
  """Returns the state of queries that have seen no chunk.

  Args:
    q: `[S, K, g, d]` float32.
  """
  shape = q.shape[:-1]
  return jnp.full(shape, NEGATIVE), jnp.zeros(shape), jnp.zeros(q.shape)


def attend_chunk(
  state: ChunkState, q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array
) -> ChunkState:
  """Returns the state after one more chunk.

  Args:
    state: The state so far.
    q: `[S, K, g, d]` float32, scaled.
    k: `[S, K, d, C]`.
    v: `[S, K, C, d]`.
    visible: Bool, broadcast to `[S, K, g, C]`.
  """
  top, total, out = state
  k, v = k.astype(jnp.float32), v.astype(jnp.float32)
  scores = jnp.einsum('skgd,skdt->skgt', q, k)
  scores = jnp.where(visible, scores, -jnp.inf)
  new_top = jnp.maximum(top, scores.max(-1))
  weights = jnp.exp(scores - new_top[..., None])
  scale = jnp.exp(top - new_top)
  total = total * scale + weights.sum(-1)
  out = out * scale[..., None] + jnp.einsum('skgt,sktd->skgd', weights, v)
  return new_top, total, out
