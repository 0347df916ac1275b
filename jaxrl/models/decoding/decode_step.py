"""A decode step runs the layers of a model for one token of every slot of a cache."""

import functools
from typing import Any

import jax

from jaxrl.models import exact_mode, layer_stack, rope
from jaxrl.models import kv_cache as caches
from jaxrl.models.kv_cache import Cache
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
  slots = None if rows is None else rows.slots
  new: dict[str, list] = {name: [()] * len(rows) for name, rows in cache.items()}
  # Not scanned: XLA's CPU backend copies what it slices out of stacked arrays.
  weights = layer_stack.unstack(model.config, params)['layers']
  for i, layer_params in enumerate(weights):
    block = layer_stack.block(model.config.layer(i), layer_params)

    def attend(q, k, v, *gates, i=i, block=block):
      rules = block.cache_rules
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
      for name, value in (('k', k), ('v', v)):
        if value is not None:
          write_args = cache[name][i], name, value, positions
          wraps = 'window' in rules
          new[name][i] = caches.write(*write_args, wraps, slots=slots)
      at = i if k is not None else model.config.layer(i).kv_layer
      chunks = new['k'][at], new['v'][at]
      if rows is not None:
        out = rows.attend(q, *chunks, limit, exact=model.exact is not None, **rules)
      elif model.exact is None:
        # On a GPU, the host would wait to know whether to skip a chunk.
        cut = None if platform_of(model.platform) == 'gpu' else limit
        out = decode_attention(q, *chunks, positions, cut, **rules)
      else:
        single = q[:, None], *chunks, positions[:, None], limit
        out = exact_mode.attend(*single, **rules)[:, 0]
      return out.astype(q.dtype), None

    extra = None if extras is None else extras[:, i]
    x, (_, chosen) = model.run_layer(block, x, rotations, attend, extra)
    if model.router_replay:
      chosen = chosen[:, None]
      new['e'][i] = caches.write(cache['e'][i], 'e', chosen, positions, slots=slots)
  cache = {name: tuple(parts) for name, parts in new.items()}
  return model.last_logits(params, x), cache
