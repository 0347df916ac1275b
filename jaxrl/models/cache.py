"""The key-value cache of decode.

Keys `[S, K, d, C]` and values `[S, K, C, d]` for S slots, in chunks of C positions:
`cache['k'][layer][chunk]`. Each is an array of its own, so that attention reads it
where it lies (a slice would be copied out first) and chunks that no sequence has
reached are never read. Positions are innermost in the keys because scores are then
sums of whole vectors. There may be 'e' beside: a token's experts, `[S, 1, C, k]`.

Where decode has a kernel the layout is that of `jaxrl.models.pages` instead.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models import pages
from jaxrl.models.config import ModelConfig

Cache = dict[str, tuple[Any, ...]]  # an array or a tuple of chunks a layer
# A prefill's: k `[L, P, K, d, T]`, v `[L, P, K, T, d]`, e `[L, P, 1, T, k]`.
Kept = dict[str, jax.Array]
CHUNK, MAX_CHUNKS = 64, 8
TIME = {'k': 3, 'v': 2, 'e': 2}  # the axis of positions in a chunk
EXPERT = 'int16'  # the dtype of an expert's number


def chunk_sizes(max_length: int) -> list[int]:
  """Positions per chunk; a multiple of 32 in all, at least `max_length`."""
  size = CHUNK * max(1, -(-max_length // (CHUNK * MAX_CHUNKS)))
  whole, rest = divmod(max_length, size)
  return [size] * whole + ([-(-rest // 32) * 32] if rest else [])


def empty(
  config: ModelConfig,
  num_slots: int,
  max_length: int,
  dtype: str,
  *,
  sizes: list[int] | None = None,
  experts: bool = False,
) -> Cache:
  """Zeros for `num_slots` sequences of up to `max_length` tokens.

  sizes: of the chunks, if not `chunk_sizes(max_length)`. experts: whether it holds
  those that tokens took.
  """
  sizes, dim = sizes or chunk_sizes(max_length), config.head_dim

  def make(shape, dtype=dtype, heads=config.num_kv_heads):
    return tuple(
      tuple(jnp.zeros((num_slots, heads, *shape(size)), dtype) for size in sizes)
      for _ in range(config.num_layers)
    )

  cache = {'k': make(lambda size: (dim, size)), 'v': make(lambda size: (size, dim))}
  if experts:
    picks = config.num_experts_per_token
    cache['e'] = make(lambda size: (size, picks), EXPERT, 1)
  return cache


def length(cache: Cache) -> int:
  """How many positions a slot has."""
  if pages.is_paged(cache):
    return pages.length(cache)
  return sum(chunk.shape[TIME['v']] for chunk in cache['v'][0])


def axes(cache: Cache) -> tuple[str | None, ...]:
  """The names of its arrays' axes: batch (the slots), kv_heads; None is never split."""
  return pages.AXES if pages.is_paged(cache) else ('batch', 'kv_heads', None, None)


def write(
  chunks: tuple[jax.Array, ...], name: str, values: jax.Array, positions: jax.Array
) -> tuple[jax.Array, ...]:
  """Puts values `[S, K, d]` at positions `[S]` of one layer's keys or values."""
  rows, start, out = jnp.arange(values.shape[0]), 0, []
  for chunk in chunks:
    size = chunk.shape[TIME[name]]
    at = positions - start
    at = jnp.where(at < 0, size, at)  # not in this chunk: dropped
    index = (rows, slice(None), slice(None), at)
    index = index if name == 'k' else (rows, slice(None), at)
    out.append(chunk.at[index].set(values.astype(chunk.dtype), mode='drop'))
    start += size
  return tuple(out)


def insert(cache: Cache, kept: Kept, row_index: jax.Array, slots: jax.Array) -> Cache:
  """Copies row `row_index[i]` of a prefill into slot `slots[i]`, for each i."""
  width = kept['k'].shape[-1]
  if width > length(cache):
    raise ValueError(
      f'a prefill of width {width} does not fit a cache of length {length(cache)}'
    )
  if pages.is_paged(cache):
    return pages.insert(cache, kept, row_index, slots)
  num_slots = cache['k'][0][0].shape[0]
  slots = jnp.where(slots < 0, num_slots, slots)

  def fill(name, layer, chunks):
    start, out = 0, []
    for chunk in chunks:
      axis = TIME[name]
      size = min(chunk.shape[axis], width - start)
      if size > 0:
        rows = jax.lax.slice_in_dim(kept[name][layer], start, start + size, axis=axis)
        rows = rows[row_index].astype(chunk.dtype)
        index = (slots, *(slice(0, n) for n in rows.shape[1:]))
        chunk = chunk.at[index].set(rows, mode='drop')
      out.append(chunk)
      start += size
    return tuple(out)

  return {
    name: tuple(fill(name, i, chunks) for i, chunks in enumerate(layers))
    for name, layers in cache.items()
  }


def experts_of(cache: Cache, slot: jax.Array) -> jax.Array:
  """The experts of one slot's tokens, by position: `[C, L, k]` int16."""
  layers = [jnp.concatenate([c[slot, 0] for c in chunks]) for chunks in cache['e']]
  return jnp.stack(layers, axis=1)


def experts_from(cache: Cache, start: jax.Array, count: int) -> jax.Array:
  """Those of the `count` tokens from position `start` `[S]` of each slot on:
  `[count, S, L, k]` int16.
  """
  at = start + jnp.arange(count)[:, None]  # [count, S]
  slots = jnp.arange(start.shape[0])

  def layer(chunks):
    begin, found = 0, 0
    for chunk in chunks:
      size = chunk.shape[TIME['e']]
      here = (at >= begin) & (at < begin + size)
      rows = chunk[slots, 0, jnp.clip(at - begin, 0, size - 1)]
      found += jnp.where(here[:, :, None], rows, 0)
      begin += size
    return found

  return jnp.stack([layer(chunks) for chunks in cache['e']], axis=2)


def copy(cache: Cache, table: jax.Array, count: jax.Array) -> Cache:
  """Slot to slot: for each of the first `count` rows (source, target, length) of
  `table` `[n, 3]` int32, in order, the source's first `length` positions or more.
  """
  if pages.is_paged(cache):
    return pages.copy(cache, table, count)

  def pair(i, cache):
    source, target, reach = table[i]

    def move(name, chunk, start):
      def once(_, chunk):
        row = jax.lax.dynamic_slice_in_dim(chunk, source, 1)
        return jax.lax.dynamic_update_slice_in_dim(chunk, row, target, 0)

      # A loop of none or one rounds: unlike a conditional it works in place.
      return jax.lax.fori_loop(0, (start < reach).astype(jnp.int32), once, chunk)

    def layer(name, chunks):
      starts = [0]
      for chunk in chunks:
        starts.append(starts[-1] + chunk.shape[TIME[name]])
      return tuple(move(name, c, s) for c, s in zip(chunks, starts, strict=False))

    return {
      name: tuple(layer(name, chunks) for chunks in layers)
      for name, layers in cache.items()
    }

  return jax.lax.fori_loop(0, count, pair, cache)
