"""Attention over whole sequences and over a cache, in plain jnp.

`H` query heads share `K` key-value heads, H a multiple of K.
"""

import jax
import jax.numpy as jnp

NEGATIVE = -1e30  # finite, so that a fully masked row gives numbers, not NaN


def attention(
  q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array
) -> jax.Array:
  """Causal attention within segments.

  q: `[B, T, H, d]`. k, v: `[B, T, K, d]`. segment_ids: `[B, T]` int32; a token sees
  the tokens before it, and itself, that bear its own segment's number.
  Returns `[B, T, H, d]`.
  """
  batch, length, heads, dim = q.shape
  kv_heads = k.shape[2]
  q = q.reshape(batch, length, kv_heads, heads // kv_heads, dim)
  scores = jnp.einsum('btkgd,bskd->bkgts', q, k).astype(jnp.float32) * dim**-0.5
  time = jnp.arange(length)
  visible = (time[:, None] >= time) & (segment_ids[:, :, None] == segment_ids[:, None])
  scores = jnp.where(visible[:, None, None], scores, NEGATIVE)
  weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  out = jnp.einsum('bkgts,bskd->btkgd', weights, v)
  return out.reshape(batch, length, heads, dim)


def decode_attention(
  q: jax.Array,
  k_cache: jax.Array,
  v_cache: jax.Array,
  positions: jax.Array,
  limit: jax.Array,
  *,
  block: int = 64,
) -> jax.Array:
  """One query a row against its own cache, the positions up to its own.

  q: `[S, H, d]`. k_cache, v_cache: `[S, K, T, d]`, T a multiple of `block`.
  positions: `[S]` int32. limit: scalar int32 > max(positions); blocks from there on
  are not read. Keys come in blocks of fixed size under a running softmax, and a fully
  masked block changes no bit, so a row depends neither on `limit` nor on other rows.
  Returns `[S, H, d]`.
  """
  slots, heads, dim = q.shape
  kv_heads = k_cache.shape[1]
  q = q.reshape(slots, kv_heads, heads // kv_heads, dim).astype(jnp.float32)
  q = q * dim**-0.5

  def step(i, carry):
    top, total, out = carry
    start = i * block
    k = jax.lax.dynamic_slice_in_dim(k_cache, start, block, 2).astype(jnp.float32)
    v = jax.lax.dynamic_slice_in_dim(v_cache, start, block, 2).astype(jnp.float32)
    scores = jnp.einsum('skgd,sktd->skgt', q, k)
    visible = (start + jnp.arange(block)) <= positions[:, None]
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    new_top = jnp.maximum(top, scores.max(-1))
    weights = jnp.exp(scores - new_top[..., None])
    scale = jnp.exp(top - new_top)
    total = total * scale + weights.sum(-1)
    out = out * scale[..., None] + jnp.einsum('skgt,sktd->skgd', weights, v)
    return new_top, total, out

  shape = q.shape[:-1]
  start = (jnp.full(shape, NEGATIVE), jnp.zeros(shape), jnp.zeros(q.shape))
  trips = (limit + block - 1) // block
  _, total, out = jax.lax.fori_loop(0, trips, step, start)
  return (out / total[..., None]).reshape(slots, heads, dim)
