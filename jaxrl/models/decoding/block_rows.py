"""Block rows run a block of a prompt's tokens through a decode step's layers.

Each token attends to the cache of its slot, which has the blocks before it. A block has
the same shape wherever it is, so its keys and values depend on the tokens up to its own
alone, bit for bit, and on no length. Prompts can therefore share them.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxrl.models import exact_mode
from jaxrl.types import AnyArray, PyTree
from kernels.attention import attend_chunk, chunk_state, visible_keys


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockRows:
  """Says which slots the tokens of P blocks are of, and where they go.

  Attributes:
    block_slots: `[P]` int32; one outside the cache is skipped.
    positions: `[P, N]` int32, of the tokens of each block.
  """

  block_slots: AnyArray
  positions: AnyArray

  @property
  def slots(self) -> jax.Array:
    """Returns the slot of each token, `[P · N]` int32."""
    return jnp.repeat(self.block_slots, self.positions.shape[1])

  def attend(
    self,
    q: jax.Array,
    k_chunks: Sequence[jax.Array],
    v_chunks: Sequence[jax.Array],
    limit: jax.Array,
    *,
    exact: bool,
    single: Callable[..., jax.Array],
    sinks: jax.Array | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    window: int = 0,
  ) -> jax.Array:
    """Attends from each token to its slot's cache, up to its own position.

    Args:
      q: Queries `[P · N, H, d]`.
      k_chunks: As in `decode_attention`.
      v_chunks: As there.
      limit: As there, not None.
      exact: Whether the exact mode computes.
      single: Not called, as a slot has several queries.
      sinks: As there.
      softcap: As there.
      scale: As there.
      window: As there, in the exact mode alone.

    Returns:
      `[P · N, H, d]` float32.
    """
    del single
    count, size = self.positions.shape
    heads, dim = q.shape[1:]

    def own(chunk: PyTree) -> PyTree:  # None stays None
      return chunk if chunk is None else chunk.at[self.block_slots].get(mode='clip')

    if exact:
      chunks = tuple(map(own, k_chunks)), tuple(map(own, v_chunks))
      blocks = q.reshape(count, size, heads, dim), *chunks, self.positions, limit
      rules = {'sinks': sinks, 'softcap': softcap, 'scale': scale, 'window': window}
      return exact_mode.attend(*blocks, **rules).reshape(q.shape)
    kv_heads = k_chunks[0].shape[1]
    q = q.reshape(count, size, kv_heads, -1, dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(count, kv_heads, -1, dim).astype(jnp.float32)
    q = q * (dim**-0.5 if scale is None else scale)

    def attend(state, k, v, start):
      visible = visible_keys(start + jnp.arange(k.shape[-1]), self.positions, 0, 0)
      visible = jnp.tile(visible, (1, heads // kv_heads, 1))[:, None]
      return attend_chunk(state, q, own(k), own(v), visible, softcap)

    state, start = chunk_state(q, sinks), 0
    for k, v in zip(k_chunks, v_chunks or (None,) * len(k_chunks), strict=True):
      run = functools.partial(attend, start=start)
      if start == 0:  # the first one is always read
        state = run(state, k, v)
      else:
        state = jax.lax.cond(start < limit, run, lambda s, *_: s, state, k, v)
      start += k.shape[-1]
    _, total, out = state
    out = (out / total[..., None]).reshape(count, kv_heads, -1, size, dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(count * size, heads, dim)
