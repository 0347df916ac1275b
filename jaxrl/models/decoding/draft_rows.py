"""Draft rows let rows of a decode step that have no token check drafts of other slots.

A decode step computes a row for every slot of the cache, whether or not the slot has a
request. A row of an idle slot can therefore compute a token that is only guessed yet:
the one that may follow in another slot. The matrices see as many rows as before, and a
row's bits depend on no other row. Attention runs in turns, of which each has one query
per slot, as without drafts. Logits therefore have the bits of a step that decodes the
same token alone.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models import exact_mode
from jaxrl.types import AnyArray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftRows:
  """Says which token of which slot each of S rows computes.

  Attributes:
    slots: `[S]` int32, the slot of each row's token.
    offsets: `[S]` int32, 0 for the token that the slot feeds anyway, else the number of
      the drafted token, from 1.
    index: `[K + 1, S]` int32, the row of each slot's token by offset. It is the slot's
      own row where no row computes that token.
    positions: `[K + 1, S]` int32, where these tokens go.
    granted: `[S]` int32, how many drafted tokens of each slot have a row.
    depth: Scalar int32, the largest of `granted`.
  """

  slots: AnyArray
  offsets: AnyArray
  index: AnyArray
  positions: AnyArray
  granted: AnyArray
  depth: AnyArray

  @classmethod
  def place(
    cls, is_busy: jax.Array, positions: jax.Array, wanted: jax.Array, most: int
  ) -> 'DraftRows':
    """Gives rows of idle slots to drafted tokens: all slots' first ones, then seconds.

    Args:
      is_busy: `[S]` bool, the slots that feed a token of their own.
      positions: `[S]` int32, where that token goes, or what an idle slot writes.
      wanted: `[S]` int32, drafted tokens of each slot, at most `most`.
      most: The most drafted tokens K of a slot.
    """
    count = len(is_busy)
    own, nowhere = jnp.arange(count, dtype=jnp.int32), count
    rank = jnp.cumsum(~is_busy) - 1
    idle = jnp.zeros(count, jnp.int32)
    idle = idle.at[jnp.where(is_busy, nowhere, rank)].set(own, mode='drop')
    number = jnp.arange(most)[:, None]
    is_wanted = number < wanted
    turn = jnp.cumsum(is_wanted.reshape(-1)).reshape(is_wanted.shape) - 1
    has_row = is_wanted & (turn < jnp.sum(~is_busy))
    drafted = jnp.where(has_row, idle[jnp.clip(turn, 0, count - 1)], nowhere)
    place = drafted.reshape(-1)
    of_slot = jnp.broadcast_to(own, drafted.shape).reshape(-1)
    offset = jnp.broadcast_to(number + 1, drafted.shape).reshape(-1)
    granted = jnp.sum(has_row, axis=0, dtype=jnp.int32)
    steps = jnp.arange(most + 1, dtype=jnp.int32)[:, None]
    return cls(
      slots=own.at[place].set(of_slot, mode='drop'),
      offsets=jnp.zeros(count, jnp.int32).at[place].set(offset, mode='drop'),
      index=jnp.concatenate([own[None], jnp.where(has_row, drafted, own)]),
      positions=positions + jnp.where(steps <= granted, steps, 0),
      granted=granted,
      depth=jnp.max(granted),
    )

  @property
  def row_positions(self) -> jax.Array:
    """Returns where the token of each row goes, `[S]` int32."""
    return self.positions[self.offsets, self.slots]

  def attend(
    self,
    q: jax.Array,
    k_chunks: Sequence[jax.Array],
    v_chunks: Sequence[jax.Array],
    limit: jax.Array,
    *,
    exact: bool,
    single: Callable[..., jax.Array],
    **rules: Any,
  ) -> jax.Array:
    """Attends from each row to its slot's cache.

    Args:
      q: Queries `[S, H, d]`, by row.
      k_chunks: As in `decode_attention`.
      v_chunks: As there.
      limit: As there, not None.
      exact: Whether the exact mode computes. There bits do not depend on the number of
        queries, and all of a slot attend together.
      single: `decode_attention` with the rules, or a kernel for it.
      **rules: As there.

    Returns:
      `[S, H, d]` float32, by row.
    """
    chunks = k_chunks, v_chunks
    if exact:
      by_slot = q[self.index].swapaxes(0, 1), *chunks, self.positions.T
      return exact_mode.attend(*by_slot, limit, **rules)[self.slots, self.offsets]
    first = single(q, *chunks, self.positions[0], limit)
    out = jnp.zeros((len(self.index), *first.shape), first.dtype).at[0].set(first)

    def turn(offset, out):
      queries, positions = q[self.index[offset]], self.positions[offset]
      one = single(queries, *chunks, positions, limit)
      return out.at[offset].set(one)

    out = jax.lax.fori_loop(1, self.depth + 1, turn, out)
    return out[self.offsets, self.slots]
