"""The key-value cache of decode.

Keys are `[S, K, d, C]` and values `[S, K, C, d]` for S slots, in chunks of C positions:
`cache['k'][layer][chunk]`. Each chunk is an array, so that attention reads it in place
(a slice would be copied first) and chunks that no sequence has reached are never read.
The chunks of a layer with a window are a ring that holds little more than the window:
position p is at p modulo their length. In exact mode they hold all positions.
Positions are innermost in the keys because scores are then sums of whole vectors. There
may be 'e' beside, a token's experts, `[S, 1, C, k]`. Latent attention keeps its latents
as keys of one head, which are their own values: a layer has no 'v'.

A gated DeltaNet has no keys and values, but a single 'state' `[S, H, dk, dv]` float32
and, as 'conv' `[S, W − 1, channels]`, the last inputs of its convolutions. Decoding
overwrites them, so that a prompt's are there only until the first token is decoded; at
position 0 they are not read.

Where decode has a kernel, the layout is that of `paged_cache` or `slot_cache` in
`jaxrl.models.decoding` instead.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models.model_config import ModelConfig
from jaxrl.options import Keywords
from jaxrl.types import PyTree
from kernels.dispatch import platform_of

Cache = dict[str, tuple[PyTree, ...]]  # an array or a tuple of chunks a layer
# A prefill's, by layer: k `[P, K, d, T]`, v `[P, K, T, d]`, e `[P, 1, T, k]`. They are
# one array each where all layers are alike, and a tuple where not.
PrefillKV = dict[str, PyTree]
CHUNK, MAX_CHUNKS = 64, 8
POSITION_AXIS = {'k': 3, 'v': 2, 'e': 2}  # the axis of positions in a chunk
STATES = {'state', 'conv'}  # what a slot has of a gated DeltaNet, whole
EXPERT_DTYPE = 'int16'  # the dtype of an expert's number


def chunk_sizes(max_length: int) -> list[int]:
  """Returns the positions per chunk: a multiple of 32 in all, at least `max_length`.

  Args:
    max_length: The longest sequence.
  """
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
  """Makes a cache of zeros.

  Args:
    config: The model's shape.
    num_slots: The number of sequences.
    max_length: The longest sequence.
    dtype: The type of keys and values.
    sizes: Positions per chunk, if not `chunk_sizes(max_length)`.
    experts: Whether it records the experts that tokens took.
  """

  def layer_sizes(layer):
    span = min(layer.span or max_length, max_length)
    return sizes or chunk_sizes(span)

  def zeros(*shape, dtype=dtype):
    return jnp.zeros((num_slots, *shape), dtype)

  cache: dict[str, list] = {'k': [], 'v': []}
  for layer in config.layer_configs:
    heads, dim, lengths = layer.num_kv_heads, layer.head_dim, layer_sizes(layer)
    if layer.kv_layer >= 0 or layer.linear_attention:
      lengths = []  # it reads another's keys, or keeps a state
    if layer.kv_latent:
      cache['k'].append(tuple(zeros(1, layer.cached_width, size) for size in lengths))
      cache['v'].append(())
      continue
    cache['k'].append(tuple(zeros(heads, dim, size) for size in lengths))
    cache['v'].append(tuple(zeros(heads, size, dim) for size in lengths))
  if config.has_linear_attention:
    cache |= _empty_states(config, num_slots, dtype)
  if experts:
    picks, lengths = config.num_experts_per_token, sizes or chunk_sizes(max_length)
    cache['e'] = [
      tuple(zeros(1, size, picks, dtype=EXPERT_DTYPE) for size in lengths)
      for _ in range(config.num_layers)
    ]
  return {name: tuple(rows) for name, rows in cache.items()}


def _empty_states(config: ModelConfig, num_slots: int, dtype: str) -> dict[str, list]:
  """Returns the zero states of gated DeltaNets; () for other layers."""
  cache: dict[str, list] = {name: [] for name in ('state', 'conv')}
  for layer in config.layer_configs:
    heads, keys = layer.linear_value_heads, layer.linear_key_dim
    shape = (num_slots, heads, keys, layer.linear_value_dim)
    channels = 2 * layer.linear_key_heads * keys + heads * layer.linear_value_dim
    states = {
      'state': (jnp.zeros(shape, jnp.float32),),
      'conv': (jnp.zeros((num_slots, layer.conv_width - 1, channels), dtype),),
    }
    for name, layers in cache.items():
      layers.append(states[name] if layer.linear_attention else ())
  return cache


def keeps_prompts(config: ModelConfig, max_length: int, *, exact: bool = False) -> bool:
  """Returns True if decoding leaves the keys and values of a prompt where they are.

  Args:
    config: The model's shape.
    max_length: The longest sequence. A layer whose window is shorter drops the oldest.
      A gated DeltaNet overwrites its state.
    exact: Whether the cache is that of the exact mode, which holds all positions.
  """
  return all(
    (exact or layer.span == 0 or layer.span >= max_length)
    and not layer.linear_attention
    for layer in config.layer_configs
  )


class SharedKV:
  """Hands keys and values of layers on to others, while a forward pass is traced."""

  def __init__(self):
    self._by_layer: dict[int, tuple[jax.Array, jax.Array]] = {}

  def read(
    self, config: ModelConfig, k: PyTree, v: PyTree
  ) -> tuple[jax.Array, jax.Array]:
    """Returns a layer's own keys and values, or those of the layer that it reads.

    Args:
      config: The layer's.
      k: Its keys, or None.
      v: Its values, or None.
    """
    return (k, v) if k is not None else self._by_layer[config.kv_layer]

  def passed_on(self, config: ModelConfig, k: jax.Array, v: jax.Array) -> PyTree:
    """Returns what `after` must get: keys and values that others read, or None."""
    return (k, v) if config.kv_is_read else None

  def after(self, layer: int, y: tuple[PyTree, PyTree]) -> tuple[PyTree, None]:
    """Keeps what a layer passes on, the second of y; for `layer_stack.run_layers`."""
    kept, passed = y
    if passed is not None:
      self._by_layer[layer] = passed
    return kept, None


def keep(
  k: jax.Array | None,
  v: jax.Array | None,
  q: jax.Array,
  window: int = 0,
  lengths: jax.Array | None = None,
) -> dict[str, jax.Array]:
  """Rearranges keys and values of a prefill into the layout of the cache.

  Args:
    k: `[P, T, K, d]`; None for a layer that has none of its own.
    v: `[P, T, K, d]`, likewise, and for one whose keys are latents.
    q: `[P, T, H, d]`, whose type that layer's empty arrays get.
    window: How many keys a query sees, 0 for all.
    lengths: `[P]` int32, with a window.

  Returns:
    k `[P, K, d, t]` and v `[P, K, t, d]`; t is T, or the length of a shorter ring.
  """
  none = jnp.zeros((q.shape[0], 1, 0, 0), q.dtype)
  if k is None or v is None:
    return {'k': none if k is None else k.transpose(0, 2, 3, 1), 'v': none}
  kv = {'k': k.transpose(0, 2, 3, 1), 'v': v.swapaxes(1, 2)}
  ring = sum(chunk_sizes(window)) if window else 0
  if not ring or k.shape[1] <= ring:
    return kv
  assert lengths is not None  # otherwise nothing says which is the last
  last = lengths[:, None] - 1
  at = jnp.maximum(last - jnp.mod(last - jnp.arange(ring), ring), 0)  # [P, t]
  return {
    'k': jnp.take_along_axis(kv['k'], at[:, None, None, :], axis=3),
    'v': jnp.take_along_axis(kv['v'], at[:, None, :, None], axis=2),
  }


def keep_states(
  state: jax.Array, inputs: tuple[jax.Array, ...], lengths: jax.Array, taps: int
) -> dict[str, jax.Array]:
  """Rearranges the states of a gated DeltaNet after a prefill into the cache's layout.

  Args:
    state: `[P, H, dk, dv]`, after the last token of each row.
    inputs: Those of its convolutions, `[P, T, heads, d]` each.
    lengths: `[P]` int32.
    taps: How many of the last inputs are kept.

  Returns:
    The state, and the last inputs as 'conv' `[P, taps, channels]`; k and v are empty.
  """
  rows = jnp.concatenate([x.reshape(*x.shape[:2], -1) for x in inputs], axis=-1)
  at = lengths[:, None] - taps + jnp.arange(taps)
  last = jnp.take_along_axis(rows, jnp.maximum(at, 0)[..., None], axis=1)
  last = jnp.where((at >= 0)[..., None], last, 0)
  return keep(None, None, inputs[0]) | {'state': state, 'conv': last}


def no_states(q: jax.Array) -> dict[str, jax.Array]:
  """Returns the empty states that a prefill has for layers with keys and values.

  Args:
    q: `[P, T, H, d]`.
  """
  none = jnp.zeros((q.shape[0], 0), q.dtype)
  return {'state': none, 'conv': none}


def paging_obstacle(config: ModelConfig) -> str:
  """Returns why no kernel decodes a model; '' if one may.

  Args:
    config: The model's shape.
  """
  names = 'window', 'attention_softcap', 'query_scale', 'kv_latent'
  unsupported = {
    n for n in names for layer in config.layer_configs if getattr(layer, n)
  }
  unsupported |= {'sinks'} if config.spec.sinks else set()
  unsupported |= {'gated DeltaNet layers'} if config.has_linear_attention else set()
  return f'does not take {" and ".join(sorted(unsupported))}' if unsupported else ''


def choose_layout(
  config: ModelConfig, dtype: str, *, kernels: str, platform: str | None
) -> Any:
  """Chooses the layout that the best kernel of decode reads.

  Args:
    config: The model's shape.
    dtype: The type of keys and values.
    kernels: As in `kernels.dispatch`.
    platform: As in `kernels.dispatch`.

  Returns:
    The `CacheLayout` of `slot_cache` or `paged_cache`; None if no kernel is used.
  """
  # Imported here, as below, because most runs on a CPU need neither.
  from jaxrl.models.decoding import paged_cache, slot_cache

  obstacle = paging_obstacle(config)
  options: Keywords = {'kernels': kernels, 'platform': platform_of(platform)}
  why = obstacle or slot_cache.obstacle(config, dtype, **options)
  if not why:
    return slot_cache.LAYOUT
  skipped = {'cudnn': why} if options['platform'] == 'gpu' else {}
  options |= {'obstacle': obstacle, 'skipped': skipped}
  has_kernel = paged_cache.has_kernel(config, dtype, **options)
  return paged_cache.LAYOUT if has_kernel else None


def layout_of(cache: Cache) -> Any:
  """Returns the layout of a cache that a kernel reads; None for one of chunks.

  Args:
    cache: The cache.
  """
  if 'k_pages' in cache:
    from jaxrl.models.decoding import paged_cache as module
  elif 'k_slots' in cache:
    from jaxrl.models.decoding import slot_cache as module
  else:
    return None
  return module.LAYOUT


def length(cache: Cache) -> int:
  """Returns how many positions a slot has.

  Args:
    cache: The cache.
  """
  if (layout := layout_of(cache)) is not None:
    return cache[next(iter(layout.names))][0].shape[layout.position_axis]
  return max(ring_length(chunks, 'k') for chunks in cache['k'])


def ring_length(chunks: tuple[jax.Array, ...], name: str = 'v') -> int:
  """Returns how many positions of one layer's values, or keys, a slot holds.

  Args:
    chunks: Those of the layer.
    name: 'k', 'v' or 'e'.
  """
  return sum(chunk.shape[POSITION_AXIS[name]] for chunk in chunks)


def axes(cache: Cache, name: str = 'k') -> tuple[str | None, ...]:
  """Returns the names of the axes of its arrays; None is never split.

  Args:
    cache: The cache.
    name: Of which arrays, one of the names in the cache.
  """
  if name == 'conv':
    return 'batch', None, None
  if (layout := layout_of(cache)) is not None:
    return layout.axes
  has_latents = not any(cache['v'])  # which all heads read
  return 'batch', None if has_latents and name == 'k' else 'kv_heads', None, None


def write(
  chunks: tuple[jax.Array, ...],
  name: str,
  values: jax.Array,
  positions: jax.Array,
  wraps: bool = False,
  slots: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
  """Puts values at positions of one layer's keys or values.

  Args:
    chunks: Those of the layer.
    name: 'k', 'v' or 'e'.
    values: `[S, K, d]`.
    positions: `[S]` int32.
    wraps: Whether the chunks are a ring.
    slots: `[S]` int32, the slot of each value; by default in their order.

  Returns:
    The chunks.
  """
  if wraps:
    positions = jnp.mod(positions, ring_length(chunks, name))
  rows = jnp.arange(values.shape[0]) if slots is None else slots
  start, out = 0, []
  for chunk in chunks:
    size = chunk.shape[POSITION_AXIS[name]]
    at = positions - start
    at = jnp.where(at < 0, size, at)  # not in this chunk: dropped
    index = (rows, slice(None), slice(None), at)
    index = index if name == 'k' else (rows, slice(None), at)
    out.append(chunk.at[index].set(values.astype(chunk.dtype), mode='drop'))
    start += size
  return tuple(out)


def insert(
  cache: Cache, kept: PrefillKV, row_index: jax.Array, slots: jax.Array
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
  width = max(k.shape[-1] for k in kept['k'])
  if width > length(cache):
    raise ValueError(
      f'a prefill of width {width} does not fit a cache of length {length(cache)}'
    )
  if (layout := layout_of(cache)) is not None:
    return layout.insert(cache, kept, row_index, slots)
  num_slots = jax.tree.leaves(cache)[0].shape[0]
  slots = jnp.where(slots < 0, num_slots, slots)

  def fill(name, layer, chunks):
    if not chunks:
      return ()
    if name in STATES:
      rows = kept[name][layer][row_index].astype(chunks[0].dtype)
      return (chunks[0].at[slots].set(rows, mode='drop'),)
    start, out, axis = 0, [], POSITION_AXIS[name]
    width = kept[name][layer].shape[axis]
    for chunk in chunks:
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
  """Returns the experts of one slot's tokens.

  Args:
    cache: The cache.
    slot: The slot.

  Returns:
    `[C, L, k]` int16, by position.
  """
  layers = [jnp.concatenate([c[slot, 0] for c in chunks]) for chunks in cache['e']]
  return jnp.stack(layers, axis=1)


def experts_from(cache: Cache, start: jax.Array, count: int) -> jax.Array:
  """Returns the experts of tokens of each slot.

  Args:
    cache: The cache.
    start: `[S]`, the first position.
    count: How many tokens.

  Returns:
    `[count, S, L, k]` int16.
  """
  at = start + jnp.arange(count)[:, None]  # [count, S]
  slots = jnp.arange(start.shape[0])

  def layer(chunks):
    begin, chosen = 0, 0
    for chunk in chunks:
      size = chunk.shape[POSITION_AXIS['e']]
      here = (at >= begin) & (at < begin + size)
      rows = chunk[slots, 0, jnp.clip(at - begin, 0, size - 1)]
      chosen += jnp.where(here[:, :, None], rows, 0)
      begin += size
    return chosen

  return jnp.stack([layer(chunks) for chunks in cache['e']], axis=2)


def copy(cache: Cache, table: jax.Array, count: jax.Array) -> Cache:
  """Copies slots to slots, in order, at least `length` positions each.

  Args:
    cache: The cache.
    table: `[n, 3]` int32: source, target and length.
    count: The number of rows of the table that count.

  Returns:
    The cache.
  """
  if (layout := layout_of(cache)) is not None:
    return layout.copy(cache, table, count)

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
      for chunk in chunks[:-1]:
        starts.append(starts[-1] + chunk.shape[POSITION_AXIS[name]])
      return tuple(move(name, c, s) for c, s in zip(chunks, starts, strict=False))

    return {
      name: tuple(layer(name, chunks) for chunks in layers)
      for name, layers in cache.items()
    }

  return jax.lax.fori_loop(0, count, pair, cache)
