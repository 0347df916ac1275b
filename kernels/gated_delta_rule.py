"""Gated delta rule computes linear attention whose state decays and is corrected.

Each head keeps a state S `[dk, dv]`. A token decays the state by α, moves the value
stored for its key by a step β towards its own value, and reads the state with its query
(Gated Delta Networks, arXiv 2412.06464):

  S ← α S,  S ← S + β k (v − Sᵀk)ᵀ,  o = Sᵀq.

The reference computes this token by token. The chunked form computes a chunk of tokens
at a time with matmuls: the updates that the tokens of a chunk write to the state solve
a triangular system (arXiv 2406.06484), and the state is carried from chunk to chunk.

A row holds several sequences. A segment starts from an empty state or, if prompts are
shared, from the state at the end of its prompt. Everything is computed in float32, and
matmuls use the highest precision.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.dispatch import REFERENCE, Candidate, choose, platform_of

CHUNK = 64  # maximum tokens per chunk, a power of two

_einsum = functools.partial(jnp.einsum, precision='highest')
_matmul = functools.partial(jnp.matmul, precision='highest')


class SegmentTree(NamedTuple):
  """The segment of each token, and the segment that it continues.

  The last three attributes are None if no segment continues another.

  Attributes:
    index: Number of the token's segment in its row, counted from 1, `[B, T]` int32.
      Padding belongs to the segment before it.
    is_token: Mask `[B, T]` bool, False at padding.
    parent: Number of the segment that the token's segment continues, `[B, T]` int32; 0
      for none.
    is_prompt: Whether another segment continues the token's segment, `[B, T]` bool.
    previous: Index in the row of the previous token of the same sequence, `[B, T]`
      int32; −1 for none.
  """

  index: jax.Array
  is_token: jax.Array
  parent: jax.Array | None = None
  is_prompt: jax.Array | None = None
  previous: jax.Array | None = None


def segment_tree(
  segment_ids: jax.Array, prefix_ids: jax.Array | None = None
) -> SegmentTree:
  """Builds the tree of segments of each row.

  Args:
    segment_ids: Segment of each token, `[B, T]` int32; 0 is padding. With `prefix_ids`,
      ids are at most T.
    prefix_ids: Id of the segment that the token's segment continues, `[B, T]` int32; 0
      for none. No other segment that is continued may lie between the two.

  Returns:
    The tree.
  """
  is_token = segment_ids != 0
  before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
  is_start = is_token & (segment_ids != before)
  index = jnp.cumsum(is_start, axis=1, dtype=jnp.int32)
  if prefix_ids is None:
    return SegmentTree(index, is_token)
  batch, length = segment_ids.shape
  rows = jnp.arange(batch)[:, None]
  time = jnp.arange(length, dtype=jnp.int32)
  table = jnp.zeros((batch, length + 1), jnp.int32)
  by_id = table.at[rows, segment_ids].max(index)
  named = jnp.where(is_token & (prefix_ids > 0), by_id[rows, prefix_ids], 0)
  parent = table.at[rows, index].max(named)[rows, index]
  is_named = table.astype(bool).at[rows, named].set(True)[rows, index]
  last = table.at[rows, index].max(jnp.where(is_token, time, 0))
  before = jnp.where(parent > 0, last[rows, parent], -1)
  previous = jnp.where(is_start, before, time - 1)
  return SegmentTree(index, is_token, parent, is_named & (index > 0), previous)


def causal_convolution(x: jax.Array, kernel: jax.Array, tree: SegmentTree) -> jax.Array:
  """Computes a causal depthwise convolution over each sequence.

  Sequences are padded with zeros at the front.

  Args:
    x: Inputs `[B, T, H, d]`.
    kernel: Weights `[W, H, d]`; the last one multiplies the token itself.
    tree: Segments of the rows.

  Returns:
    Outputs `[B, T, H, d]` float32.
  """
  x, kernel = x.astype(jnp.float32), kernel.astype(jnp.float32)
  width, length = len(kernel), x.shape[1]
  total, previous = x * kernel[-1], tree.previous
  at = jnp.zeros_like(tree.index) if previous is None else previous
  for back in range(1, width):
    if previous is None:
      moved = jnp.pad(x, ((0, 0), (back, 0), (0, 0), (0, 0)))[:, :length]
      index = jnp.pad(tree.index, ((0, 0), (back, 0)), constant_values=-1)
      is_same = index[:, :length] == tree.index
    else:
      if back > 1:
        further = jnp.take_along_axis(previous, jnp.maximum(at, 0), axis=1)
        at = jnp.where(at < 0, -1, further)
      moved = jnp.take_along_axis(x, jnp.maximum(at, 0)[..., None, None], axis=1)
      is_same = at >= 0
    total += jnp.where(is_same[..., None, None], moved, 0) * kernel[width - 1 - back]
  return total


def gated_delta_rule(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  log_decay: jax.Array,
  beta: jax.Array,
  tree: SegmentTree,
  *,
  kernels: str = 'auto',
  platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Runs the gated delta rule over rows, in the best form for the platform.

  H value heads share K query and key heads; H is a multiple of K.

  Args:
    q: Queries `[B, T, K, dk]`.
    k: Keys `[B, T, K, dk]`, with norm at most 1.
    v: Values `[B, T, H, dv]`.
    log_decay: Log of the decay α, at most 0, `[B, T, H]`.
    beta: Step size β from 0 to 1, `[B, T, H]`.
    tree: Segments of the rows.
    kernels: As in `kernels.dispatch`.
    platform: As in `kernels.dispatch`.

  Returns:
    The outputs o `[B, T, H, dv]`, and the state after the last token of each row
    `[B, H, dk, dv]`, both float32.
  """
  candidates: dict[str, Candidate] = {
    'chunked': chunked_gated_delta_rule,
    REFERENCE: recurrent_gated_delta_rule,
  }
  options = {'platform': platform_of(platform), 'option': kernels}
  run = candidates[choose('gated delta rule', candidates, **options)]
  assert callable(run)  # `choose` returns the name of a usable candidate
  return run(q, k, v, log_decay, beta, tree)


def gated_delta_step(
  state: jax.Array,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  log_decay: jax.Array,
  beta: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Runs the gated delta rule for one token of each sequence.

  Args:
    state: States `[S, H, dk, dv]` float32.
    q: Queries `[S, K, dk]`.
    k: Keys `[S, K, dk]`.
    v: Values `[S, H, dv]`.
    log_decay: Log of the decay α, `[S, H]`.
    beta: Step size β, `[S, H]`.

  Returns:
    The outputs o `[S, H, dv]` float32, and the new states.
  """
  q, k, v, log_decay, beta = _widened(q, k, v, log_decay, beta)
  q, k = (jnp.repeat(x, v.shape[1] // x.shape[1], axis=1) for x in (q, k))
  state = jnp.exp(log_decay)[..., None, None] * state
  change = beta[..., None] * (v - _einsum('shkv,shk->shv', state, k))
  state = state + k[..., :, None] * change[..., None, :]
  return _einsum('shkv,shk->shv', state, q), state


def recurrent_gated_delta_rule(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  log_decay: jax.Array,
  beta: jax.Array,
  tree: SegmentTree,
) -> tuple[jax.Array, jax.Array]:
  """Runs the gated delta rule token by token; see `gated_delta_rule`."""
  arrays = _without_padding(_widened(q, k, v, log_decay, beta), tree)
  shape = (q.shape[0], v.shape[2], q.shape[3], v.shape[3])
  empty = jnp.zeros(shape, jnp.float32)
  before = jnp.pad(tree.index[:, :-1], ((0, 0), (1, 0)))
  parents = tree.parent if tree.parent is not None else jnp.zeros_like(tree.index)
  prompts = tree.is_prompt if tree.is_prompt is not None else jnp.zeros_like(before)
  rows = arrays, tree.index != before, parents > 0, prompts > 0

  def run(carry, inputs):
    state, saved = carry
    token, is_start, has_parent, is_prompt = jax.tree.map(
      lambda x: (
        x.reshape(len(x), *x.shape[1:], *(1,) * (4 - x.ndim)) if x.dtype == bool else x
      ),
      inputs,
    )
    state = jnp.where(is_start, jnp.where(has_parent, saved, 0), state)
    out, state = gated_delta_step(state, *token)
    return (state, jnp.where(is_prompt, state, saved)), out

  rows = jax.tree.map(lambda x: x.swapaxes(0, 1), rows)
  (state, _), out = jax.lax.scan(run, (empty, empty), rows)
  return out.swapaxes(0, 1), state


def chunked_gated_delta_rule(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  log_decay: jax.Array,
  beta: jax.Array,
  tree: SegmentTree,
  *,
  chunk: int = CHUNK,
) -> tuple[jax.Array, jax.Array]:
  """Runs the gated delta rule a chunk of tokens at a time; see `gated_delta_rule`.

  Args:
    q: As in `gated_delta_rule`.
    k: As in `gated_delta_rule`.
    v: As in `gated_delta_rule`.
    log_decay: As in `gated_delta_rule`.
    beta: As in `gated_delta_rule`.
    tree: As in `gated_delta_rule`.
    chunk: Maximum number of tokens per chunk, a power of two.
  """
  arrays = _without_padding(_widened(q, k, v, log_decay, beta), tree)
  (batch, length, kv_heads, dim), (heads, wide) = k.shape, v.shape[2:]
  size = min(chunk, 1 << (length - 1).bit_length())
  count = -(-length // size)

  def cut(x: jax.Array, mode: str = 'constant') -> jax.Array:
    """Splits `[B, T, …]` into chunks `[N, B, C, …]`."""
    padding = ((0, 0), (0, count * size - length), *((0, 0),) * (x.ndim - 2))
    x = jnp.pad(x, padding, mode=mode)
    return x.reshape(batch, count, size, *x.shape[2:]).swapaxes(0, 1)

  def by_head(x: jax.Array) -> jax.Array:
    """Reshapes `[N, B, C, H, …]` to `[N, B, K, H / K, C, …]`."""
    x = x.reshape(*x.shape[:3], kv_heads, -1, *x.shape[4:])
    return jnp.moveaxis(x, 2, 4)

  q, k = (jnp.moveaxis(cut(x), 2, 3) for x in arrays[:2])  # [N, B, K, C, dk]
  v, log_decay, beta = (by_head(cut(x)) for x in arrays[2:])
  edges = jax.tree.map(lambda x: cut(x, 'edge'), tree)
  decay, carried = _decays(log_decay, edges)
  scores = _einsum('nbkid,nbkjd->nbkij', k, k)[:, :, :, None] * decay
  scores = jnp.tril(beta[..., None] * scores, -1)
  solve = functools.partial(
    _einsum, 'nbkhij,nbkhj...->nbkhi...', _unit_lower_inverse(scores)
  )
  keys, queries = k[:, :, :, None], q[:, :, :, None]
  writes = solve(beta[..., None] * v)
  chunk_terms = {
    'own': writes,
    'weights': _einsum('nbkid,nbkjd->nbkij', q, k)[:, :, :, None] * decay,
    # The contribution of each carried state to the corrections and the outputs.
    'reads': [solve((beta * c)[..., None] * keys) for c in carried],
    'queries': [c[..., None] * queries for c in carried],
    'ends': _ends(decay, carried, keys, edges),
  }

  def run(states, terms):
    new, out = terms['own'], 0
    for state, read, query in zip(
      states, terms['reads'], terms['queries'], strict=True
    ):
      new = new - _einsum('bkhid,bkhdv->bkhiv', read, state)
      out = out + _einsum('bkhid,bkhdv->bkhiv', query, state)
    out = out + _einsum('bkhij,bkhjv->bkhiv', terms['weights'], new)
    new_states = []
    for i, (keys, factors, is_new) in enumerate(terms['ends']):
      state = _einsum('bkhjd,bkhjv->bkhdv', keys, new)
      for factor, before in zip(factors, states, strict=True):
        state = state + factor[..., None, None] * before
      new_states.append(
        state if is_new is None else jnp.where(is_new, state, states[i])
      )
    return new_states, out

  state = jnp.zeros((batch, kv_heads, heads // kv_heads, dim, wide), jnp.float32)
  states, out = jax.lax.scan(run, [state for _ in carried], chunk_terms)
  # [N, B, K, H / K, C, dv] → [B, T, H, dv]
  out = out.transpose(1, 0, 4, 2, 3, 5).reshape(batch, count * size, heads, wide)
  return out[:, :length], states[0].reshape(batch, heads, dim, wide)


def _widened(*arrays: jax.Array) -> list[jax.Array]:
  return [x.astype(jnp.float32) for x in arrays]


def _without_padding(arrays: list[jax.Array], tree: SegmentTree) -> list[jax.Array]:
  """Sets the log decay and β of padding to 0, so that it leaves the state unchanged."""
  *rest, log_decay, beta = arrays
  return [
    *rest,
    *(jnp.where(tree.is_token[..., None], x, 0) for x in (log_decay, beta)),
  ]


def _decays(
  log_decay: jax.Array, tree: SegmentTree
) -> tuple[jax.Array, list[jax.Array]]:
  """Computes how much of earlier tokens and states is left at each token of a chunk.

  This factor is 0 for tokens and states that do not belong to the token's sequence.

  Args:
    log_decay: Log decay of N chunks, `[N, B, K, h, C]`.
    tree: Tree with arrays `[N, B, C]`.

  Returns:
    The factor between two tokens of a chunk, `[N, B, K, h, C, C]`, with the earlier
    token on the last axis; and a list with the factor of each state that enters the
    chunk, `[N, B, K, h, C]`. The first state is the one after the token before the
    chunk. If segments continue others, the second state is the one after the last token
    of the latest prompt before the chunk.
  """
  size = log_decay.shape[-1]
  total = jnp.cumsum(log_decay, axis=-1)
  index = tree.index[:, :, None, None]
  entered = jnp.pad(tree.index[:-1, :, -1], ((1, 0), (0, 0)))[:, :, None, None, None]
  path = total[..., :, None] - total[..., None, :]
  is_same = index[..., :, None] == index[..., None, :]
  is_before = jnp.tril(jnp.ones((size, size), bool))
  is_entered = index == entered
  if tree.parent is None:
    return _exp(path, is_same & is_before), [_exp(total, is_entered)]
  parent = tree.parent[:, :, None, None]
  before = jnp.concatenate([entered, index[..., :-1]], axis=-1)
  after = jnp.pad(index[..., 1:], ((0, 0),) * 4 + ((0, 1),), constant_values=-1)
  is_parent = (parent[..., :, None] == index[..., None, :]) & (parent > 0)[..., None]
  # Leave out the decay between the end of a prompt and the start of its continuation.
  ends = jnp.where(is_parent & (index != after)[..., None, :], total[..., None, :], 0)
  starts = is_same & (index != before)[..., None, :]
  starts = jnp.where(starts, (total - log_decay)[..., None, :], 0)
  skipped = ends.sum(-1) - starts.sum(-1)
  path = path + jnp.where(is_parent, skipped[..., None], 0)
  from_entered = (parent == entered) & (parent > 0) & ~is_entered
  from_saved = (parent > 0) & ~is_entered & ~from_entered & ~is_parent.any(-1)
  left = total + jnp.where(is_entered, 0, skipped)
  return _exp(path, (is_same | is_parent) & is_before), [
    _exp(left, is_entered | from_entered),
    _exp(left, from_saved),
  ]


def _exp(x: jax.Array, where: jax.Array) -> jax.Array:
  """Computes exp(x) where the mask is True and 0 elsewhere, with finite gradients."""
  return jnp.where(where, jnp.exp(jnp.where(where, x, 0)), 0)


def _ends(
  decay: jax.Array, carried: list[jax.Array], keys: jax.Array, tree: SegmentTree
) -> list[tuple[jax.Array, list[jax.Array], jax.Array | None]]:
  """Returns the terms that make up the states that leave a chunk.

  Returns:
    For each state: the keys scaled by their decay, `[N, B, K, h, C, dk]`; the decay of
    each state that entered the chunk, `[N, B, K, h]`; and whether the chunk changes the
    state, `[N, B, 1, 1, 1, 1]`, or None if it always does.
  """
  last_keys = decay[..., -1, :, None] * keys
  if tree.is_prompt is None:
    return [(last_keys, [c[..., -1] for c in carried], None)]
  size = decay.shape[-1]
  last = size - 1 - jnp.argmax(tree.is_prompt[..., ::-1], axis=-1)
  last = last[:, :, None, None, None]
  left = jnp.take_along_axis(decay, last[..., None], axis=-2)[..., 0, :, None]
  factors = [jnp.take_along_axis(c, last, axis=-1)[..., 0] for c in carried]
  is_new = tree.is_prompt.any(-1)[:, :, None, None, None, None]
  return [
    (last_keys, [c[..., -1] for c in carried], None),
    (left * keys, factors, is_new),
  ]


@jax.custom_jvp
def _unit_lower_inverse(x: jax.Array) -> jax.Array:
  """Inverts I + x for a strictly lower triangular x `[…, C, C]`, C a power of 2.

  It inverts the diagonal blocks and doubles their size step by step:
  [[A, 0], [L, B]]⁻¹ = D − D [[0, 0], [L, 0]] D, where D is the block diagonal matrix of
  A⁻¹ and B⁻¹. This is as precise as forward substitution. The products are of full
  matrices although most of their blocks are zero: TPUs multiply full matrices fast,
  while small blocks need much more memory and compile time there.
  """
  size, rows = 1, jnp.arange(x.shape[-1])
  inverse = jnp.broadcast_to(jnp.eye(len(rows), dtype=x.dtype), x.shape)
  while size < len(rows):
    block = rows // size
    # Select the lower left quarter of each block of double size.
    is_lower = (block[:, None] == block + 1) & (block % 2 == 0)
    lower = jnp.where(is_lower, x, 0)
    inverse -= _matmul(_matmul(inverse, lower), inverse) if size > 1 else lower
    size *= 2
  return inverse


@_unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(
  primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
  """Computes the tangent of the inverse, −(I + x)⁻¹ dx (I + x)⁻¹."""
  inverse = _unit_lower_inverse(*primals)
  return inverse, -_matmul(_matmul(inverse, tangents[0]), inverse)
