"""A decode step runs the layers of a model for one token of every slot of a cache."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxrl.models import exact_mode, layer_stack, rope
from jaxrl.models import kv_cache as caches
from jaxrl.models.kv_cache import Cache
from jaxrl.options import Keywords
from jaxrl.types import Params, PyTree
from kernels.attention import decode_attention
from kernels.dispatch import platform_of


def decode(
  model: Any,
  params: Params,
  cache: Cache,
  tokens: jax.Array,
  positions: jax.Array,
  limit: jax.Array,
  rotations: dict[str, rope.Rotation] | None = None,
  rows: PyTree = None,
) -> tuple[jax.Array, Cache]:
  """Computes what `TransformerLM.decode` returns.

  Args:
    model: The `TransformerLM`.
    params: As there, like all that follow.
    cache: The cache.
    tokens: `[S]` int32.
    positions: `[S]` int32.
    limit: A scalar.
    rotations: Those of the positions, where they are known before.
    rows: The `DraftRows` or `BlockRows` that say which slots the tokens are of, for a
      cache of chunks; None if there is one token of every slot, in order.

  Returns:
    Logits `[S, V]` float32 and the cache.
  """
  x, own_rotations, extras = model.enter(params, tokens, positions)
  rotations = rotations or own_rotations
  layout, options = caches.layout_of(cache), model.kernel_options()
  del options['row_segments']
  new: dict[str, list] = {name: [()] * len(rows) for name, rows in cache.items()}
  tokens_at = _TokensAt(model, positions, limit, rows)
  # Not scanned: XLA's CPU backend copies what it slices out of stacked arrays.
  weights = layer_stack.unstack(model.config, params)['layers']
  for i, layer_params in enumerate(weights):
    block = layer_stack.block(model.config.layer(i), layer_params)

    def attend(q, k, v, *gates, i=i, block=block):
      if gates:
        states = {name: cache[name][i][0] for name in caches.STATES}
        step = functools.partial(exact_mode.step_token, block.delta.step)
        step = step if model.exact is not None else block.delta.step
        out, states = step((q, k, v, *gates), states, positions)
        for name, state in states.items():
          new[name][i] = (state,)
        return out, None
      if layout is not None:
        step_arguments = cache, i, (q, k, v), positions, limit
        out, layer_arrays = layout.step(*step_arguments, **options)
        for name in layer_arrays:
          new[name][i] = layer_arrays[name]
        return out.astype(q.dtype), None
      arguments = block.cache_rules, cache, new, i, (q, k, v)
      return _attend_chunks(tokens_at, *arguments).astype(q.dtype), None

    extra = None if extras is None else extras[:, i]
    x, (_, chosen) = model.run_layer(block, x, rotations, attend, extra)
    if model.router_replay:
      chosen = chosen[:, None]
      slots = None if rows is None else rows.slots
      new['e'][i] = caches.write(cache['e'][i], 'e', chosen, positions, slots=slots)
  cache = {name: tuple(parts) for name, parts in new.items()}
  return model.last_logits(params, x), cache


class _TokensAt(NamedTuple):
  """A model and where its tokens are; the attributes are arguments of `decode`."""

  model: Any
  positions: jax.Array
  limit: jax.Array
  rows: PyTree

  def use_native(self, k_chunks: PyTree, v_chunks: PyTree, rules: Keywords) -> bool:
    """Returns True if the kernel for CPUs attends to a layer's chunks."""
    model = self.model
    if platform_of(model.platform) != 'cpu' or model.exact is not None:
      return False
    if not k_chunks or not model.is_on_one_device:
      return False
    from kernels.native import chunk_attention  # not for other platforms

    options: Keywords = {'kernels': model.kernels, **rules}
    return not chunk_attention.obstacle(model.platform, k_chunks, v_chunks, **options)


def _attend_chunks(
  tokens_at: _TokensAt,
  rules: Keywords,
  cache: Cache,
  new: dict[str, list],
  layer: int,
  qkv: tuple[jax.Array, jax.Array | None, jax.Array | None],
) -> jax.Array:
  """Attends to chunks, and puts those with a layer's new keys and values into `new`."""
  model, positions, limit, rows = tokens_at
  q, k, v = qkv
  own = cache['k'][layer], cache['v'][layer]
  is_native = tokens_at.use_native(*own, rules)
  if is_native and rows is None and k is not None and v is not None:
    from kernels.native import chunk_attention

    write = functools.partial(
      chunk_attention.write_and_decode, scale=rules.get('scale')
    )
    out, new['k'][layer], new['v'][layer] = write(q, k, v, *own, positions, limit)
    return out
  slots = None if rows is None else rows.slots
  for name, value in (('k', k), ('v', v)):
    if value is not None:
      write_args = cache[name][layer], name, value, positions
      wraps = 'window' in rules
      new[name][layer] = caches.write(*write_args, wraps, slots=slots)
  at = layer if k is not None else model.config.layer(layer).kv_layer
  chunks = new['k'][at], new['v'][at]
  is_exact, single = model.exact is not None, _single(is_native, rules)
  if rows is not None:
    return rows.attend(q, *chunks, limit, exact=is_exact, single=single, **rules)
  if is_exact:
    one = q[:, None], *chunks, positions[:, None], limit
    return exact_mode.attend(*one, **rules)[:, 0]
  # On a GPU, the host would wait to know whether to skip a chunk.
  cut = None if platform_of(model.platform) == 'gpu' else limit
  return single(q, *chunks, positions, cut)


def _single(is_native: bool, rules: Keywords) -> Callable[..., jax.Array]:
  """Returns the attention of one query per slot."""
  if not is_native:
    return functools.partial(decode_attention, **rules)
  from kernels.native import chunk_attention

  return functools.partial(chunk_attention.decode, scale=rules.get('scale'))
