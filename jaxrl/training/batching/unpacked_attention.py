"""Unpacked attention computes the attention of packed rows with one sequence per row.

Layers run on packed rows, which hold a shared prompt once. Only queries, keys and
values are unpacked to a padded batch `[B, T]` with one sequence per row, and the output
of attention is packed again. If a packed row holds several sequences of similar
lengths, the padded batch has fewer pairs of tokens. It also needs no kernel that
supports shared prompts.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.custom_derivatives import linear_call

from jaxrl.types import Array, PackedRows
from kernels.attention import skips_other_segments
from kernels.flash_attention import MIN_LENGTH


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UnpackedRows:
  """Maps the slots of packed rows `[R, L]` to a padded batch `[B, T]` and back.

  Attributes:
    source: Flat index r · L + c of the slot that holds each token, `[B, T]` int32; −1
      at padding. Tokens of a shared prompt are in the slots of the prompt.
    origin: Flat index b · T + t of the token that each slot holds, `[R, L]` int32; −1
      at padding.
    segment_ids: Segments `[B, T]` int32, 0 at padding.
    shared: Number of tokens at the start of each row that share their slots with row
      `first`, `[B]` int32. None if no prompt is shared.
    first: Row that holds the slots of the shared tokens, `[B]` int32; the row itself if
      it shares none. None if no prompt is shared.
  """

  source: Array
  origin: Array
  segment_ids: Array
  shared: Array | None
  first: Array | None


def is_cheaper(rows: PackedRows, platform: str) -> bool:
  """Returns True if attention on unpacked rows is less work and fits in memory.

  The padded batch must have at most half as many pairs of tokens as the packed rows,
  because attention on packed rows skips some pairs, and unpacking has a cost too. It
  must have at most twice as many slots, because the memory of a micro-batch is
  estimated from the packed rows. On an accelerator, it must be long enough for a
  kernel.

  Args:
    rows: Packed rows.
    platform: Platform to compile for: 'cpu', 'gpu' or 'tpu'.
  """
  (count, length), (sequences, longest) = rows.origin.shape, rows.place.shape
  pairs, slots = sequences * longest**2, sequences * longest
  is_small = 2 * pairs <= count * length**2 and slots <= 2 * count * length
  return is_small and (platform == 'cpu' or longest >= MIN_LENGTH)


def unpack_rows(rows: PackedRows, segment_ids: Array) -> UnpackedRows:
  """Returns the map from packed rows to one row per sequence.

  Args:
    rows: Packed rows.
    segment_ids: Segments of the padded batch, `[B, T]` int32. Tokens without a slot get
      segment 0.
  """
  rows = jax.tree.map(jnp.asarray, rows)
  has_output, source, shared, first = rows.place >= 0, rows.place, None, None
  if rows.prefix_ids is not None:
    own_row = jnp.arange(len(has_output), dtype=jnp.int32)
    # No slot predicts the tokens of a shared prompt, so they have no output.
    shared = jnp.argmax(has_output, axis=1).astype(jnp.int32)
    head = jnp.maximum(rows.place[own_row, shared], 0)
    row, width = head // rows.origin.shape[1], rows.origin.shape[1]
    prefix = rows.prefix_ids.reshape(-1)[head]
    has_prefix = has_output.any(axis=1) & (prefix > 0)
    shared = jnp.where(has_prefix, shared, 0)
    start = jnp.argmax(rows.segment_ids[row] == prefix[:, None], axis=1)
    time = jnp.arange(has_output.shape[1], dtype=jnp.int32)
    slots = (row * width + start.astype(jnp.int32))[:, None] + time
    source = jnp.where(time < shared[:, None], slots, source)
    origin_row = rows.origin[row, start] // has_output.shape[1]
    first = jnp.where(has_prefix, origin_row, own_row)
  ids = jnp.where(source >= 0, segment_ids, 0)
  return UnpackedRows(source, rows.origin, ids, shared, first)


def attend(
  unpacked: UnpackedRows,
  rows: PackedRows,
  run: 'functools.partial[Array]',
  q: Array,
  k: Array,
  v: Array,
) -> Array:
  """Computes the attention of packed rows with one sequence per row.

  A kernel that skips the pairs of other sequences gets the packed rows as they are.

  Args:
    unpacked: Map from `unpack_rows`.
    rows: The packed rows.
    run: `kernels.attention.attention` with options.
    q: Queries `[R, L, H, d]`.
    k: Keys `[R, L, K, d]`.
    v: Values `[R, L, K, d]`.

  Returns:
    Output `[R, L, H, d]`.
  """
  if skips_other_segments(q, k, v, **run.keywords):
    return run(q, k, v, rows.segment_ids, prefix_ids=rows.prefix_ids)
  q, k, v = (linear_call(_spread, _gather, unpacked, x) for x in (q, k, v))
  out = run(q, k, v, unpacked.segment_ids)
  return linear_call(_collect, _return, unpacked, out)


def _spread(unpacked: UnpackedRows, x: Array) -> Array:
  """Unpacks `[R, L, …]` to `[B, T, …]`; a shared prompt is copied to all its rows."""
  return _take(x, unpacked.source)


def _gather(unpacked: UnpackedRows, x: Array) -> Array:
  """Computes the transpose of `_spread`, `[B, T, …]` → `[R, L, …]`.

  The rows that share a prompt are first summed as whole rows. A scatter-add by slots
  would need many small sums, which a CPU computes one after the other.
  """
  if unpacked.shared is None:
    return _take(x, unpacked.origin)
  here = _wide(jnp.arange(x.shape[1]) < unpacked.shared[:, None], x)
  total = jnp.zeros(x.shape, jnp.float32)
  total = total.at[unpacked.first].add(jnp.where(here, x, 0).astype(jnp.float32))
  return _take(total.astype(x.dtype) + jnp.where(here, 0, x), unpacked.origin)


def _collect(unpacked: UnpackedRows, x: Array) -> Array:
  """Packs `[B, T, …]` to `[R, L, …]`; a shared prompt is taken from its first row."""
  return _take(x, unpacked.origin)


def _return(unpacked: UnpackedRows, x: Array) -> Array:
  """Computes the transpose of `_collect`, `[R, L, …]` → `[B, T, …]`."""
  tokens = _take(x, unpacked.source)
  if unpacked.shared is None:
    return tokens
  rows, length = unpacked.source.shape
  is_own = jnp.arange(length) >= unpacked.shared[:, None]
  is_own |= (unpacked.first == jnp.arange(rows))[:, None]
  return jnp.where(_wide(is_own, x), tokens, 0)


def _take(x: Array, places: Array) -> Array:
  """Gathers `x` at flat indices into its first two axes; −1 gives 0."""
  taken = x.reshape(-1, *x.shape[2:])[jnp.maximum(places, 0)]
  return jnp.where(_wide(places >= 0, taken), taken, 0)


def _wide(mask: Array, x: Array) -> Array:
  return mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
