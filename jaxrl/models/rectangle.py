"""Attention of packed rows, done where each of their sequences has a row of its own.

Layers run on packed rows, whose shared prompts are there once; only queries, keys and
values are spread over the rectangle, and what attention makes of them is collected from
it. Where a packed row holds several sequences of like lengths, that is fewer pairs of
tokens, and kernels that know no shared prompts take it.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_derivatives import linear_call

from jaxrl.types import Array, Rows
from kernels.padding import BLOCK


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rectangle:
  """Where the slots of packed rows `[R, L]` are in a rectangle `[B, T]`.

  source: `[B, T]` int32, r · L + c of the slot that a token lies in, its own or that of
  the shared prompt; −1 where nothing is. origin: `[R, L]` int32, b · T + t of the token
  whose state a slot is, −1 at padding. segment_ids: `[B, T]` int32, 0 where nothing is.
  shared: `[B]` int32, of the tokens that a row begins with, how many lie in the slots
  of row `first` `[B]`; None where nothing is shared.
  """

  source: Array
  origin: Array
  segment_ids: Array
  shared: Array | None
  first: Array | None


def spares(rows: Rows, platform: str) -> bool:
  """Whether the rectangle is the lesser work, for what it takes in memory.

  It has at most half of the packed rows' pairs of tokens: these leave out some of
  theirs, and spreading costs too. Its queries, keys and values are at most twice
  theirs, for a micro-batch's memory is asked for in their slots. On an accelerator it
  is long enough for a kernel.
  """
  (count, length), (sequences, longest) = rows.origin.shape, rows.place.shape
  pairs, slots = sequences * longest**2, sequences * longest
  small = 2 * pairs <= count * length**2 and slots <= 2 * count * length
  return small and (platform == 'cpu' or longest >= BLOCK)


def of(rows: Rows, segment_ids: Array) -> Rectangle:
  """segment_ids: `[B, T]` of the rectangle; a row that lies in no slot has none."""
  rows = jax.tree.map(jnp.asarray, rows)
  told, source, shared, first = rows.place >= 0, rows.place, None, None
  if rows.prefix_ids is not None:
    own = jnp.arange(len(told), dtype=jnp.int32)
    shared = jnp.argmax(told, axis=1).astype(jnp.int32)  # it is told nowhere
    head = jnp.maximum(rows.place[own, shared], 0)
    row, width = head // rows.origin.shape[1], rows.origin.shape[1]
    prefix = rows.prefix_ids.reshape(-1)[head]
    there = told.any(axis=1) & (prefix > 0)
    shared = jnp.where(there, shared, 0)
    start = jnp.argmax(rows.segment_ids[row] == prefix[:, None], axis=1)
    time = jnp.arange(told.shape[1], dtype=jnp.int32)
    slots = (row * width + start.astype(jnp.int32))[:, None] + time
    source = jnp.where(time < shared[:, None], slots, source)
    first = jnp.where(there, rows.origin[row, start] // told.shape[1], own)
  ids = jnp.where(source >= 0, segment_ids, 0)
  return Rectangle(source, rows.origin, ids, shared, first)


def attend(
  run: Callable[..., Array], q: Array, k: Array, v: Array, rectangle: Rectangle
) -> Array:
  """`run(q, k, v, segment_ids)` on the rectangle. q, k, v, result: `[R, L, …]`."""
  q, k, v = (linear_call(_spread, _gather, rectangle, x) for x in (q, k, v))
  out = run(q, k, v, rectangle.segment_ids)
  return linear_call(_collect, _return, rectangle, out)


def _spread(own: Rectangle, x: Array) -> Array:
  """`[R, L, …]` → `[B, T, …]`; a shared prompt goes to all of its rows."""
  return _taken(x, own.source)


def _gather(own: Rectangle, x: Array) -> Array:
  """`_spread`, transposed: `[B, T, …]` → `[R, L, …]`.

  Rows of one prompt are summed as wholes first: few large sums, where a sum by slots
  would be many small ones, which a CPU does one after the other.
  """
  if own.shared is None:
    return _taken(x, own.origin)
  here = _wide(jnp.arange(x.shape[1]) < own.shared[:, None], x)
  total = jnp.zeros(x.shape, jnp.float32)
  total = total.at[own.first].add(jnp.where(here, x, 0).astype(jnp.float32))
  return _taken(total.astype(x.dtype) + jnp.where(here, 0, x), own.origin)


def _collect(own: Rectangle, x: Array) -> Array:
  """`[B, T, …]` → `[R, L, …]`; of a shared prompt, what its first row has."""
  return _taken(x, own.origin)


def _return(own: Rectangle, x: Array) -> Array:
  """`_collect`, transposed: `[R, L, …]` → `[B, T, …]`."""
  found = _taken(x, own.source)
  if own.shared is None:
    return found
  rows, length = own.source.shape
  is_own = jnp.arange(length) >= own.shared[:, None]
  is_own |= (own.first == jnp.arange(rows))[:, None]
  return jnp.where(_wide(is_own, x), found, 0)


def _taken(x: Array, places: Array) -> Array:
  """Of `x` with its first two axes as one, those at `places`; 0 at −1."""
  found = x.reshape(-1, *x.shape[2:])[jnp.maximum(places, 0)]
  return jnp.where(_wide(places >= 0, found), found, 0)


def _wide(mask: Array, x: Array) -> Array:
  return mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
