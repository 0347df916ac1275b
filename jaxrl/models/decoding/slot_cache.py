"""The slot cache has the layout that cuDNN's attention reads, for GPUs.

Keys and values are `[S, T, K, d]` for S slots of T positions, one array per layer:
`cache['k_slots'][layer]`. A slot's positions lie one behind the other, and cuDNN is
told how many of them count. The functions are those of `jaxrl.models.kv_cache`, which
calls them for such a cache.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models.model_config import ModelConfig
from kernels import cudnn_attention, dispatch

Cache = dict[str, tuple[Any, ...]]
AXES = ('batch', None, 'kv_heads', None)
POSITION_AXIS = 1
KEPT = {'k_slots': 'k', 'v_slots': 'v'}  # what a prefill calls them
MULTIPLE = 64  # of positions: what cuDNN reads at a time
Shard = Callable[..., Callable[..., jax.Array]]


def obstacle(config: ModelConfig, dtype: str, *, kernels: str, platform: str) -> str:
  """Returns why cuDNN does not read the cache; '' if it does, which is logged.

  Args:
    config: The model's shape, which no other obstacle keeps from using kernels.
    dtype: The type of keys and values.
    kernels: As in `kernels.dispatch`.
    platform: 'cpu', 'gpu' or 'tpu'.
  """
  if platform != 'gpu':
    return f'is for gpu, not {platform}'
  if kernels == dispatch.REFERENCE:
    return 'not asked for'
  heads = config.num_heads, config.num_kv_heads, config.head_dim
  why = cudnn_attention.decode_obstacle(*heads, dtype)
  if not why:
    candidates = {'cudnn': cudnn_attention.decode}
    dispatch.choose('decode attention', candidates, platform=platform)
  return why


def empty(config: ModelConfig, num_slots: int, max_length: int, dtype: str) -> Cache:
  """Makes a cache of zeros.

  Args:
    config: The model's shape.
    num_slots: The number of sequences.
    max_length: The longest sequence.
    dtype: The type of keys and values.
  """
  length = -(-max_length // MULTIPLE) * MULTIPLE
  shape = (num_slots, length, config.num_kv_heads, config.head_dim)
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
    kernels: Not read: the layout is that of one kernel.
    platform: Likewise.
    shard: Runs a function on each device of a mesh.

  Returns:
    The output `[S, H, d]` float32 and this layer's arrays by name.
  """
  del kernels, platform
  q, k, v = queries
  put, attend = _write, cudnn_attention.decode
  if shard is not None:
    heads, rows = ('batch', 'heads', None), ('batch',)
    put = shard(_write, (AXES, ('batch', 'kv_heads', None), rows), AXES)
    attend = shard(attend, (heads, AXES, AXES, rows), heads)
  new = {
    name: put(cache[name][layer], value, positions)
    for name, value in zip(KEPT, (k, v), strict=True)
  }
  lengths = jnp.where(positions < limit, positions + 1, 1)
  keys, values = new.values()
  return attend(q, keys, values, lengths), new


def _write(kept: jax.Array, values: jax.Array, positions: jax.Array) -> jax.Array:
  slots = jnp.arange(len(positions))
  return kept.at[slots, positions].set(values.astype(kept.dtype), mode='drop')


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
  num_slots = len(cache['k_slots'][0])
  slots = jnp.where(slots < 0, num_slots, slots)

  def fill(name, layer, old):
    rows = kept[KEPT[name]][layer][row_index]
    order = (0, 3, 1, 2) if name == 'k_slots' else (0, 2, 1, 3)
    rows = rows.transpose(order).astype(old.dtype)  # [P, t, K, d]
    return old.at[slots, : rows.shape[1]].set(rows, mode='drop')

  return {
    name: tuple(fill(name, i, old) for i, old in enumerate(layers))
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

    def part(j, cache):
      def move(kept):
        size = (1, MULTIPLE, *kept.shape[2:])
        some = jax.lax.dynamic_slice(kept, (source, j * MULTIPLE, 0, 0), size)
        return jax.lax.dynamic_update_slice(kept, some, (target, j * MULTIPLE, 0, 0))

      return jax.tree.map(move, cache)

    return jax.lax.fori_loop(0, -(-reach // MULTIPLE), part, cache)

  return jax.lax.fori_loop(0, count, pair, cache)
