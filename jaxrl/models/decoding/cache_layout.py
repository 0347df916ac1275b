"""A cache layout orders the axes of a key-value cache as a kernel of decode reads them.

Such a cache has one array of keys and one of values per layer, `cache['k_…'][layer]`,
with an axis each for slots, positions, key-value heads and width.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models.model_config import ModelConfig
from jaxrl.types import PyTree

Cache = dict[str, tuple[PyTree, ...]]
Shard = Callable[..., Callable[..., jax.Array]]
PREFILL_AXES = ('batch', 'kv_heads', 'position', 'width')


@dataclasses.dataclass(frozen=True)
class CacheLayout:
  """Makes, fills and copies caches of one layout, and decodes from them.

  Attributes:
    names: Names of the arrays in the cache, and what a prefill calls them: 'k' or 'v'.
    order: The axes, in the layout's order; 'batch' is that of slots.
    multiple: Positions are a multiple of it, and copied so many at a time.
    attend: `(q, keys, values, lengths, kernels=…, platform=…, shard=…) -> output`, runs
      the kernel.
  """

  names: Mapping[str, str]
  order: tuple[str, ...]
  multiple: int
  attend: Callable[..., jax.Array]

  @property
  def axes(self) -> tuple[str | None, ...]:
    """Names of the axes that a mesh may split; None for the others."""
    return tuple(name if name in ('batch', 'kv_heads') else None for name in self.order)

  @property
  def position_axis(self) -> int:
    """The axis of positions."""
    return self.order.index('position')

  def empty(
    self, config: ModelConfig, num_slots: int, max_length: int, dtype: str
  ) -> Cache:
    """Makes a cache of zeros.

    Args:
      config: The model's shape.
      num_slots: The number of sequences.
      max_length: The longest sequence.
      dtype: The type of keys and values.
    """
    sizes = {
      'batch': num_slots,
      'position': -(-max_length // self.multiple) * self.multiple,
      'kv_heads': config.num_kv_heads,
      'width': config.head_dim,
    }
    shape, layers = tuple(sizes[name] for name in self.order), range(config.num_layers)
    return {name: tuple(jnp.zeros(shape, dtype) for _ in layers) for name in self.names}

  def step(
    self,
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
      positions: `[S]` int32; the output of a slot whose position is not below `limit`
        is not read.
      limit: A scalar int32.
      kernels: As in `kernels.dispatch`.
      platform: As in `kernels.dispatch`.
      shard: Runs a function on each device of a mesh.

    Returns:
      The output `[S, H, d]` float32 and this layer's arrays by name.
    """
    q, k, v = queries
    put = self._write
    if shard is not None:
      put = shard(put, (self.axes, ('batch', 'kv_heads', None), ('batch',)), self.axes)
    new = {
      name: put(cache[name][layer], value, positions)
      for name, value in zip(self.names, (k, v), strict=True)
    }
    lengths = jnp.where(positions < limit, positions + 1, 1)
    options = {'kernels': kernels, 'platform': platform, 'shard': shard}
    return self.attend(q, *new.values(), lengths, **options), new

  def _write(
    self, array: jax.Array, values: jax.Array, positions: jax.Array
  ) -> jax.Array:
    """Puts values `[S, K, d]` at one position of each slot."""
    rest = [name for name in self.order if name != 'position']
    values = values.transpose([('batch', 'kv_heads', 'width').index(n) for n in rest])
    index = self._index(jnp.arange(len(positions)), positions)
    return array.at[index].set(values.astype(array.dtype), mode='drop')

  def _index(self, slots: jax.Array, positions: object) -> tuple[Any, ...]:
    """Indexes an array of the cache by slots and positions."""
    parts = {'batch': slots, 'position': positions}
    return tuple(parts.get(name, slice(None)) for name in self.order)

  def insert(
    self,
    cache: Cache,
    kept: dict[str, jax.Array],
    row_index: jax.Array,
    slots: jax.Array,
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
    order = [PREFILL_AXES.index(name) for name in self.order]

    def fill(name: str, layer: int, array: jax.Array) -> jax.Array:
      num_slots = array.shape[self.order.index('batch')]
      place = jnp.where(slots < 0, num_slots, slots)
      rows = kept[self.names[name]][layer][row_index]
      rows = rows.swapaxes(2, 3) if self.names[name] == 'k' else rows
      rows = rows.transpose(order).astype(array.dtype)
      index = self._index(place, slice(rows.shape[self.position_axis]))
      return array.at[index].set(rows, mode='drop')

    return {
      name: tuple(fill(name, i, array) for i, array in enumerate(layers))
      for name, layers in cache.items()
    }

  def copy(self, cache: Cache, table: jax.Array, count: jax.Array) -> Cache:
    """Copies slots to slots, in order, at least `length` positions each.

    Args:
      cache: The cache.
      table: `[n, 3]` int32: source, target and length.
      count: The number of rows of the table that count.

    Returns:
      The cache.
    """

    def start(slot: jax.Array, position: jax.Array) -> tuple[Any, ...]:
      parts = {'batch': slot, 'position': position}
      return tuple(parts.get(name, 0) for name in self.order)

    def pair(i, cache):
      source, target, reach = table[i]

      def part(j, cache):
        def move(array):
          size = list(array.shape)
          size[self.order.index('batch')] = 1
          size[self.position_axis] = self.multiple
          at = j * self.multiple
          some = jax.lax.dynamic_slice(array, start(source, at), size)
          return jax.lax.dynamic_update_slice(array, some, start(target, at))

        return jax.tree.map(move, cache)

      return jax.lax.fori_loop(0, -(-reach // self.multiple), part, cache)

    return jax.lax.fori_loop(0, count, pair, cache)
