"""Chunked logits compute token scores chunk by chunk, without the full logits.

The table is the weight matrix of the language-model head. The backward pass recomputes
the logits of a chunk and adds to the gradients in place; the gradient of an unsharded
table is computed one block of entries at a time. A plain `jax.lax.scan` would hold a
whole table gradient per chunk and a second copy of the hidden states. If the table and
the hidden states differ in dtype, the table is cast block by block, because a cast copy
of the whole table is as large as the logits of several thousand positions.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from kernels.dispatch import PyTree

T = TypeVar('T')


class AxisBlock(NamedTuple):
  """A block of `size` consecutive elements of an axis, starting at `start`.

  The last block ends at the end of the axis, so it may overlap the block before it:
  elements before index `first` belong to both. Axes must not be negative. The methods
  are not meant to be differentiated.
  """

  start: jax.Array
  first: jax.Array
  size: int

  def take(self, x: jax.Array, axis: int) -> jax.Array:
    """Slices the block out of an array.

    Args:
      x: The array.
      axis: The axis.

    Returns:
      The block.
    """
    cut = jax.lax.dynamic_slice_in_dim
    return _moved(lambda x: cut(x, self.start, self.size, axis), x)

  def put(self, into: jax.Array, x: jax.Array, axis: int) -> jax.Array:
    """Writes a block into an array.

    Args:
      into: The array.
      x: The block.
      axis: The axis.

    Returns:
      The updated array.
    """
    put = jax.lax.dynamic_update_slice_in_dim
    return _moved(lambda into, x: put(into, x, self.start, axis), into, x)

  def add(self, into: jax.Array, x: jax.Array, axis: int) -> jax.Array:
    """Adds a block to an array, without the overlap with the previous block.

    Args:
      into: The array.
      x: The block.
      axis: The axis.

    Returns:
      The updated array.
    """
    return self.put(into, self.take(into, axis) + self.new(x, axis), axis)

  def new(self, x: jax.Array, axis: int) -> jax.Array:
    """Sets the overlap with the previous block to zero.

    Args:
      x: The block.
      axis: The axis.

    Returns:
      The block with zeros in place of the overlap.
    """
    new = self.start + jnp.arange(self.size) >= self.first
    return jnp.where(new.reshape(-1, *(1,) * (x.ndim - axis - 1)), x, 0)


def _moved(move: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
  """Applies `move`, which copies elements unchanged, to arrays of one dtype.

  On CPU, bfloat16 and float16 arrays are moved as uint16: XLA has no 16-bit floats
  there, and would convert the whole array to float32 to slice or update it.
  """
  dtype, as_type = arrays[0].dtype, jax.lax.bitcast_convert_type
  if dtype not in (jnp.bfloat16, jnp.float16):
    return move(*arrays)

  def by_bits(*arrays: jax.Array) -> jax.Array:
    return as_type(move(*(as_type(x, jnp.uint16) for x in arrays)), dtype)

  return jax.lax.platform_dependent(*arrays, cpu=by_bits, default=move)


def scan_blocks(
  step: Callable[[T, AxisBlock], T], carry: T, length: int, size: int, multiple: int = 1
) -> T:
  """Runs a step over all blocks of an axis.

  The axis is split into blocks that are as even as possible, so that the last two
  overlap little. A block has at most `size` elements; if there are several blocks,
  their size is then rounded up to a multiple of `multiple`.

  Args:
    step: Function `(carry, block) -> carry`.
    carry: Initial carry.
    length: Length of the axis, at least 1.
    size: Largest size of a block, before rounding.
    multiple: Block sizes are multiples of this number.

  Returns:
    The final carry.
  """
  count = -(-length // min(length, size))
  if count == 1:
    return step(carry, AxisBlock(jnp.int32(0), jnp.int32(0), length))
  even = -(-length // count)
  size = min(length, -(-even // multiple) * multiple)

  def body(carry, index):
    first = index * size
    return step(carry, AxisBlock(jnp.minimum(first, length - size), first, size)), None

  return jax.lax.scan(body, carry, jnp.arange(-(-length // size)))[0]


VOCAB_BLOCK = 8192  # table entries to cast, or to compute the gradient of, at a time


class ChunkScoring(NamedTuple):
  """Says how to score a chunk.

  Attributes:
    score: Function `(logits, inputs, shared) -> arrays [B, S, …]` that scores S
      positions of each row. `logits` holds one `[B, S, V]` float32 array per pair of
      hidden states and table; `inputs` are sliced to these S positions.
    size: Positions S per chunk.
    entries: As in `score_in_chunks`.
  """

  score: Callable[..., PyTree]
  size: int
  entries: int | None


def score_in_chunks(
  score: Callable[..., PyTree],
  pairs: tuple[tuple[jax.Array, jax.Array], ...],
  inputs: PyTree = (),
  shared: PyTree = (),
  *,
  max_rows: int,
  entries: int | None = VOCAB_BLOCK,
) -> PyTree:
  """Scores all positions, at most `max_rows` at a time.

  A chunk has at least one position of every row. The function is differentiable in
  `pairs` and `shared`, in reverse mode only: `jax.jvp` raises TypeError if there are
  several chunks.

  Args:
    score: Scoring function; see `ChunkScoring`.
    pairs: Pairs of hidden states `[B, T, D]` and a table `[V, D]`; the logits are their
      products.
    inputs: Arrays `[B, T, …]` that get no gradient.
    shared: Floating-point arrays that all positions use.
    max_rows: Maximum number of positions per chunk.
    entries: Number of table entries that are cast, or whose gradient is computed, at a
      time. None for all, which is best for a sharded table.

  Returns:
    The arrays that `score` returns, for all positions.
  """
  batch, length = pairs[0][0].shape[:2]
  size = max(1, max_rows // max(1, batch))
  if size >= length:
    return score(tuple(_logits(*pair, None) for pair in pairs), inputs, shared)
  size = -(-length // -(-length // size))  # same number of chunks, as even as possible
  return _chunked(ChunkScoring(score, size, entries), pairs, inputs, shared)


def _logits(states: jax.Array, table: jax.Array, entries: int | None) -> jax.Array:
  """Computes the logits `[B, S, V]` float32 of states `[B, S, D]`, table `[V, D]`."""
  rows, vocab = states.reshape(-1, states.shape[-1]), len(table)

  def add(logits, block):
    part = _part(table, block, states.dtype)
    new = jnp.dot(rows, part.T, preferred_element_type=jnp.float32)
    return new if logits is None else block.put(logits, new, 1)

  size = _at_once(states, table, entries)
  start: PyTree = None if size == vocab else jnp.zeros((len(rows), vocab), jnp.float32)
  return scan_blocks(add, start, vocab, size).reshape(*states.shape[:2], -1)


def _at_once(states: jax.Array, table: jax.Array, entries: int | None) -> int:
  """Returns how many table entries are cast to the dtype of the states at a time."""
  vocab = len(table)
  return vocab if states.dtype == table.dtype else min(entries or vocab, vocab)


def _part(table: jax.Array, block: AxisBlock, dtype: jnp.dtype) -> jax.Array:
  """Returns the block's table entries `[S, D]` in `dtype`."""
  if block.size == len(table):
    return table.astype(dtype)
  # `start` is never negative, so this multiplies by 1. The compiler cannot know that,
  # which keeps it from casting the whole table before the loop.
  one = jnp.where(block.start < 0, 0, 1).astype(table.dtype)
  return (block.take(table, 0) * one).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(of: ChunkScoring, pairs: PyTree, inputs: PyTree, shared: PyTree) -> PyTree:
  length = pairs[0][0].shape[1]

  def score(chunk):
    logits = tuple(
      _logits(chunk.take(states, 1), table, of.entries) for states, table in pairs
    )
    return of.score(logits, jax.tree.map(lambda x: chunk.take(x, 1), inputs), shared)

  def step(out, chunk):
    return jax.tree.map(lambda into, x: chunk.put(into, x, 1), out, score(chunk))

  shapes = jax.eval_shape(lambda: score(AxisBlock(jnp.int32(0), jnp.int32(0), of.size)))
  whole = lambda x: jnp.zeros((x.shape[0], length, *x.shape[2:]), x.dtype)  # noqa: E731
  return scan_blocks(step, jax.tree.map(whole, shapes), length, of.size)


def _forward(of: ChunkScoring, *primals: PyTree) -> PyTree:
  values = jax.tree.map(lambda x: x.value, primals, is_leaf=_is_primal)
  learns = jax.tree.map(lambda x: x.perturbed, primals[0], is_leaf=_is_primal)
  # A Python bool would be traced as an array; the structure of a tree stays static.
  needs_gradient = jax.tree.map(lambda x: () if x else None, learns)
  return _chunked(of, *values), (values, needs_gradient)


def _is_primal(x: object) -> bool:
  return hasattr(x, 'perturbed')


def _backward(of: ChunkScoring, rest: PyTree, by: PyTree) -> PyTree:
  """Computes only the gradients that are needed.

  States and tables that are not differentiated get no gradient, and outputs whose
  cotangent is a symbolic zero are skipped.
  """
  (pairs, inputs, shared), learns = rest
  by = jax.tree.leaves(by, is_leaf=_is_zero)
  live = [i for i, x in enumerate(by) if not _is_zero(x)]

  def step(sums, chunk):
    of_pairs, of_shared = sums
    parts = [chunk.take(states, 1) for states, _ in pairs]
    own_inputs = jax.tree.map(lambda x: chunk.take(x, 1), inputs)

    def score(logits, shared):
      scores = jax.tree.leaves(of.score(logits, own_inputs, shared))
      return [scores[i] for i in live]

    logits = tuple(
      _logits(x, table, of.entries) for x, (_, table) in zip(parts, pairs, strict=True)
    )
    slopes = [chunk.new(chunk.take(by[i], 1), 1) for i in live]
    of_logits, new_shared = jax.vjp(score, logits, shared)[1](slopes)
    new_pairs = []
    for before, d, x, (_, table) in zip(of_pairs, of_logits, parts, pairs, strict=True):
      of_states, of_table = before
      if of_states is not None:
        of_states = chunk.add(of_states, _of_states(d, x, table, of.entries), 1)
      if of_table is not None:
        of_table = _add_of_table(of_table, d, x, of.entries)
      new_pairs.append((of_states, of_table))
    return tuple(new_pairs), jax.tree.map(jnp.add, of_shared, new_shared)

  nothing = tuple(
    (
      None if of_states is None else jnp.zeros_like(states),
      None if of_table is None else jnp.zeros(table.shape, jnp.float32),
    )
    for (states, table), (of_states, of_table) in zip(pairs, learns, strict=True)
  )
  start = nothing, jax.tree.map(jnp.zeros_like, shared)
  of_pairs, of_shared = scan_blocks(step, start, pairs[0][0].shape[1], of.size)
  of_pairs = tuple(
    (of_states, None if of_table is None else of_table.astype(table.dtype))
    for (of_states, of_table), (_, table) in zip(of_pairs, pairs, strict=True)
  )
  return of_pairs, None, of_shared


def _is_zero(x: object) -> bool:
  return isinstance(x, jax.custom_derivatives.SymbolicZero)


_chunked.defvjp(_forward, _backward, symbolic_zeros=True)


def _of_states(
  d: jax.Array, states: jax.Array, table: jax.Array, entries: int | None
) -> jax.Array:
  """Computes the gradient of the states from the gradient of the logits, `d`.

  Args:
    d: Gradient of the logits `[B, S, V]`.
    states: Hidden states `[B, S, D]`.
    table: Table `[V, D]`.
    entries: As in `score_in_chunks`.
  """
  vocab, width = table.shape
  d = d.reshape(-1, vocab).astype(states.dtype)

  def add(total, block):
    new = block.new(block.take(d, 1), 1) if block.size < vocab else d
    part = _part(table, block, states.dtype)
    new = jnp.dot(new, part, preferred_element_type=jnp.float32)
    return new if total is None else total + new

  size = _at_once(states, table, entries)
  start: PyTree = None if size == vocab else jnp.zeros((len(d), width), jnp.float32)
  grad = scan_blocks(add, start, vocab, size)
  return grad.reshape(states.shape).astype(states.dtype)


def _add_of_table(
  of_table: jax.Array, d: jax.Array, states: jax.Array, entries: int | None
) -> jax.Array:
  """Adds a chunk's gradient of the table to `of_table`, `entries` at a time.

  Args:
    of_table: Gradient so far, `[V, D]` float32.
    d: Gradient of the chunk's logits `[B, S, V]`.
    states: Hidden states of the chunk `[B, S, D]`.
    entries: As in `score_in_chunks`.
  """
  vocab, width = of_table.shape
  rows, d = states.reshape(-1, width), d.reshape(-1, vocab).astype(states.dtype)

  def add(of_table, block):
    part = block.take(d, 1).T
    new = jnp.dot(part, rows, preferred_element_type=jnp.float32)
    return block.add(of_table, new, 0)

  return scan_blocks(add, of_table, vocab, entries or vocab)
