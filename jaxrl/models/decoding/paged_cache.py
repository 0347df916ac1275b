"""The paged cache has the layout that kernels of paged attention read.

Keys and values are `[K, S, T, d]` for S slots, one array per layer:
`cache['k_pages'][layer]`. The functions are those of `jaxrl.models.kv_cache`, which
calls them for such a cache.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models.model_config import ModelConfig
from kernels.dispatch import REFERENCE
from kernels.paged_attention import PAGE, choose_kernel, paged_attention

Cache = dict[str, tuple[Any, ...]]
AXES = ('kv_heads', 'batch', None, None)
POSITION_AXIS = 2
KEPT = {'k_pages': 'k', 'v_pages': 'v'}  # what a prefill calls them
Shard = Callable[..., Callable[..., jax.Array]]


def has_kernel(
  config: ModelConfig,
  dtype: str,
  *,
  obstacle: str,
  skipped: Mapping[str, str],
  kernels: str,
  platform: str | None,
) -> bool:
  """Returns whether a kernel of paged attention is used.

  Args:
    config: The model's shape.
    dtype: The type of keys and values.
    obstacle: Why the model cannot use one; '' for no reason.
    skipped: Kernels for other layouts of the cache, and why they are not used.
    kernels: As in `kernels.dispatch`.
    platform: As in `kernels.dispatch`.
  """
  return (
    choose_kernel(
      config.head_dim,
      dtype,
      obstacle=obstacle,
      skipped=skipped,
      kernels=kernels,
      platform=platform,
    )
    != REFERENCE
  )


def empty(config: ModelConfig, num_slots: int, max_length: int, dtype: str) -> Cache:
  """Makes a cache of zeros.

  Args:
    config: The model's shape.
    num_slots: The number of sequences.
    max_length: The longest sequence.
    dtype: The type of keys and values.
  """
  length = -(-max_length // PAGE) * PAGE
  shape = (config.num_kv_heads, num_slots, length, config.head_dim)
  layers = range(config.num_layers)
  return {name: tuple(jnp.zeros(shape, dtype) for _ in layers) for name in KEPT}


def step(
  cache: Cache,
  layer: int,
  queries: tuple[jax.Array, jax.Array, jax.Array],
  positions: jax.Array,
  limit: jax.Array,
  *,
  kernels: str,
  platform: str | None,
  shard: Shard | None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Writes one position of every slot, and attends to those up to it.

  Args:
    cache: The cache.
    layer: The number of the layer.
    queries: q `[S, H, d]`, k and v `[S, K, d]`.
    positions: `[S]` int32; the output of a slot whose position is not below `limit` is
      not read.
    limit: A scalar int32.
    kernels: As in `kernels.dispatch`.
    platform: As in `kernels.dispatch`.
    shard: Runs a function on each device of a mesh.

  Returns:
    The output `[S, H, d]` float32 and this layer's arrays by name.
  """
  q, k, v = queries
  put = _write
  if shard is not None:
    put = shard(_write, (AXES, ('batch', 'kv_heads', None), ('batch',)), AXES)
  new = {
    name: put(cache[name][layer], value, positions)
    for name, value in zip(KEPT, (k, v), strict=True)
  }
  lengths = jnp.where(positions < limit, positions + 1, 1)
  keys, values = new.values()
  options = {'kernels': kernels, 'platform': platform, 'shard': shard}
  return paged_attention(q, keys, values, lengths, **options), new


def _write(pages: jax.Array, values: jax.Array, positions: jax.Array) -> jax.Array:
  slots = jnp.arange(len(positions))
  values = values.swapaxes(0, 1).astype(pages.dtype)
  return pages.at[:, slots, positions].set(values, mode='drop')


def insert(
  cache: Cache, kept: dict[str, jax.Array], row_index: jax.Array, slots: jax.Array
) -> Cache:
  """Copies rows of a prefill into slots.

  Args:
    cache: The cache.
    kept: Keys and values of a prefill.
    row_index: `[n]` int32, rows of the prefill.
    slots: `[n]` int32, where each goes.

  Returns:
    The cache.
  """
  num_slots = cache['k_pages'][0].shape[1]
  slots = jnp.where(slots < 0, num_slots, slots)

  def fill(name, layer, pages):
    rows = kept[KEPT[name]][layer][row_index]
    rows = rows if name == 'v_pages' else rows.swapaxes(2, 3)  # [P, K, t, d]
    rows = rows.swapaxes(0, 1).astype(pages.dtype)
    return pages.at[:, slots, : rows.shape[2]].set(rows, mode='drop')

  return {
    name: tuple(fill(name, i, pages) for i, pages in enumerate(layers))
    for name, layers in cache.items()
  }


def copy(cache: Cache, table: jax.Array, count: jax.Array) -> Cache:
  """Copies slots to slots, in order, at least `length` positions each.

  Args:
    cache: The cache.
    table: `[n, 3]` int32: source, target and length.
    count: The number of rows of the table that count.

  Returns:
    The cache.
  """

  def pair(i, cache):
    source, target, reach = table[i]

    def page(j, cache):
      def move(pages):
        heads, _, _, dim = pages.shape
        part = (heads, 1, PAGE, dim)
        part = jax.lax.dynamic_slice(pages, (0, source, j * PAGE, 0), part)
        return jax.lax.dynamic_update_slice(pages, part, (0, target, j * PAGE, 0))

      return jax.tree.map(move, cache)

    return jax.lax.fori_loop(0, -(-reach // PAGE), page, cache)

  return jax.lax.fori_loop(0, count, pair, cache)
