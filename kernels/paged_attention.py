"""Paged attention runs one query per slot over a cache that consists of pages.

Keys and values are `[K, S, T, d]` for S slots of T positions. A page holds consecutive
positions of one slot and head, so it is contiguous in memory, as JAX's own kernel for
TPU expects. T is a multiple of `PAGE`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp

from kernels.dispatch import REFERENCE, choose, platform_of

PAGE = 128


def reference(
  q: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array
) -> jax.Array:
  """Computes paged attention in plain jnp.

  Args:
    q: Queries `[S, H, d]`.
    keys: Cached keys `[K, S, T, d]`.
    values: Cached values `[K, S, T, d]`.
    lengths: Positions that each slot attends to, from its first one on, `[S]` int32, at
      least 1.

  Returns:
    Output `[S, H, d]` float32.
  """
  slots, heads, dim = q.shape
  q = q.reshape(slots, keys.shape[0], -1, dim).astype(jnp.float32) * dim**-0.5
  scores = jnp.einsum('skgd,kstd->skgt', q, keys.astype(jnp.float32))
  seen = jnp.arange(keys.shape[2]) < lengths[:, None, None, None]
  weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
  out = jnp.einsum('skgt,kstd->skgd', weights, values.astype(jnp.float32))
  return out.reshape(slots, heads, dim)


def mosaic(
  q: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array
) -> jax.Array:
  """Computes paged attention with `jax.experimental.pallas.ops.tpu`.

  The kernel accumulates the output in the dtype of the queries, so they are cast to
  float32. The softmax's scores and sums are float32; the matmuls are bfloat16.

  Args:
    q: Queries `[S, H, d]`.
    keys: Cached keys `[K, S, T, d]`.
    values: Cached values `[K, S, T, d]`.
    lengths: Positions that each slot attends to, from its first one on, `[S]` int32, at
      least 1.

  Returns:
    Output `[S, H, d]` float32.
  """
  from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

  size = next(size for size in (512, 256, PAGE) if keys.shape[2] % size == 0)
  q = q.astype(jnp.float32) * q.shape[-1] ** -0.5
  k, v, table = _in_pages(keys, values, size)
  return paged_attention(
    q, k, v, lengths, table, pages_per_compute_block=1, inline_seq_dim=True
  )


def choose_kernel(
  head_dim: int,
  dtype: str,
  *,
  obstacle: str = '',
  skipped: Mapping[str, str] = MappingProxyType({}),
  kernels: str = 'auto',
  platform: str | None = None,
) -> str:
  """Chooses the kernel for paged attention.

  Args:
    head_dim: Dimension d of a head.
    dtype: Dtype of the cache.
    obstacle: Reason why the model cannot use any kernel; '' for none.
    skipped: Kernels for other layouts of the cache, and why they are not used.
    kernels: As in `kernels.dispatch`.
    platform: As in `kernels.dispatch`.

  Returns:
    'mosaic', or 'reference' if no kernel is used.
  """
  platform = platform_of(platform)
  candidates = _candidates(head_dim, dtype, platform)
  if obstacle:
    candidates = dict.fromkeys(candidates, obstacle)
  candidates = {**skipped, **candidates, REFERENCE: reference}
  return choose('decode attention', candidates, platform=platform, option=kernels)


def paged_attention(
  q: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  lengths: jax.Array,
  *,
  kernels: str = 'auto',
  platform: str | None = None,
  shard: Callable[..., Callable[..., jax.Array]] | None = None,
) -> jax.Array:
  """Computes attention from one query per slot to the first positions of its cache.

  The result of a slot depends neither on other slots nor on the cache past its length.

  Args:
    q: Queries `[S, H, d]`.
    keys: Cached keys `[K, S, T, d]`.
    values: Cached values `[K, S, T, d]`.
    lengths: Positions that each slot attends to, from its first one on, `[S]` int32, at
      least 1.
    kernels: As in `kernels.dispatch`.
    platform: As in `kernels.dispatch`.
    shard: As in `kernels.attention.attention`.

  Returns:
    Output `[S, H, d]` float32.
  """
  options = {'kernels': kernels, 'platform': platform}
  name = choose_kernel(q.shape[-1], keys.dtype.name, **options)
  run = {'mosaic': mosaic}.get(name, reference)
  if shard is not None and name != REFERENCE:
    pages = ('kv_heads', 'batch', None, None)
    heads = ('batch', 'heads', None)
    run = shard(run, (heads, pages, pages, ('batch',)), heads)
  return run(q, keys, values, lengths)


def _candidates(
  head_dim: int, dtype: str, platform: str
) -> dict[str, Callable[..., jax.Array] | str]:
  if platform == 'tpu':
    why = ''
    if dtype != 'bfloat16':
      why = f'computes in bfloat16, and the cache is {dtype}'
    elif head_dim % 128:
      why = f'needs a head_dim that 128 divides, not {head_dim}'
    return {'mosaic': why or mosaic}
  return {}


def _in_pages(
  keys: jax.Array, values: jax.Array, size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Reshapes keys and values to pages, and returns the page table.

  Args:
    keys: Cached keys `[K, S, T, d]`.
    values: Cached values `[K, S, T, d]`.
    size: Positions per page.

  Returns:
    Keys and values `[K, pages, size, d]`, and the page indices of each slot `[S, n]`.
  """
  heads, slots, length, dim = keys.shape
  table = jnp.arange(slots * length // size, dtype=jnp.int32).reshape(slots, -1)
  keys, values = (x.reshape(heads, -1, size, dim) for x in (keys, values))
  return keys, values, table
