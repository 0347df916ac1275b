"""Ring attention computes attention over a length that is sharded over devices.

Each row is split into 2n equal blocks for n devices. Device i holds blocks i and
2n − 1 − i, so that all devices have the same amount of causal work. In each of n − 1
steps, every device passes its keys and values on to the next device in the ring; a
running softmax combines the results (Liu et al. 2023, Ring Attention; Brandon et al.
2023, Striped Attention, for the load balance). A device holds the scores of `block`
queries against one block of keys at a time, and nothing else that grows faster than its
share of the length. The backward pass recomputes the scores.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.attention import NEGATIVE
from kernels.dispatch import PyTree

State = tuple[
  jax.Array, jax.Array
]  # output [B, K, g, t, d] and its logsumexp [B, K, g, t]


class Queries(NamedTuple):
  """A block of queries.

  Attributes:
    q: Queries `[B, K, g, t, d]`.
    seen: Segments that each query attends to, `[B, t, S]`.
  """

  q: jax.Array
  seen: jax.Array


class Keys(NamedTuple):
  """A block of keys and values.

  Attributes:
    k: Keys `[B, K, s, d]`.
    v: Values `[B, K, s, e]`.
    ids: Segment of each key, `[B, s]`.
  """

  k: jax.Array
  v: jax.Array
  ids: jax.Array


def zigzag(x: jax.Array, devices: int) -> jax.Array:
  """Rearranges rows so that the two blocks of a device form rows of their own.

  Rows i · B to (i + 1) · B of the result belong to device i.

  Args:
    x: Array `[B, T, …]`, T a multiple of 2 · devices.
    devices: Number of devices.

  Returns:
    Array `[devices · B, T / devices, …]`.
  """
  batch, length = x.shape[:2]
  x = x.reshape(batch, 2, devices, length // (2 * devices), *x.shape[2:])
  x = jnp.stack([x[:, 0], x[:, 1, ::-1]], axis=2)  # [B, n, 2, t, …]
  return x.swapaxes(0, 1).reshape(devices * batch, -1, *x.shape[4:])


def unzigzag(x: jax.Array, devices: int) -> jax.Array:
  """Undoes `zigzag`.

  Args:
    x: Array from `zigzag`.
    devices: Number of devices.
  """
  batch, length = x.shape[0] // devices, x.shape[1] // 2
  x = x.reshape(devices, batch, 2, length, *x.shape[2:]).swapaxes(0, 1)
  x = jnp.stack([x[:, :, 0], x[:, ::-1, 1]], axis=1)  # [B, 2, n, t, …]
  return x.reshape(batch, -1, *x.shape[4:])


def ring_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
  *,
  axis: str,
  prefix_ids: jax.Array | None = None,
  block: int = 256,
) -> jax.Array:
  """Computes `kernels.attention.attention` for the blocks of this device.

  Call it inside `jax.shard_map` over mesh axis `axis`, with arrays that `zigzag` has
  rearranged.

  Args:
    q: Queries `[B, t, H, d]`, t even.
    k: Keys `[B, t, K, d]`.
    v: Values `[B, t, K, e]`.
    segment_ids: Segments `[B, t]` int32.
    axis: Name of the mesh axis.
    prefix_ids: Prefix segments `[B, t]` int32, as in `attention`, or None.
    block: Maximum number of queries whose scores are held at a time.

  Returns:
    Output `[B, t, H, e]`.
  """
  batch, length, heads, dim = q.shape
  kv_heads = k.shape[2]
  seen = segment_ids[..., None]
  if prefix_ids is not None:
    prefix = jnp.where(prefix_ids > 0, prefix_ids, segment_ids)
    seen = jnp.stack([segment_ids, prefix], axis=-1)
  grouped = q.reshape(batch, length, kv_heads, heads // kv_heads, dim)
  queries = Queries(grouped.transpose(0, 2, 3, 1, 4), seen)
  keys = Keys(k.swapaxes(1, 2), v.swapaxes(1, 2), segment_ids)
  out: Any = _ring(axis, _chunk(length // 2, block), queries, keys)
  return out.transpose(0, 3, 1, 2, 4).reshape(*q.shape[:3], v.shape[-1])


def _chunk(length: int, block: int) -> int:
  """Returns the largest divisor of `length` that is at most `block`."""
  return next(size for size in range(min(length, block), 0, -1) if length % size == 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(axis: str, size: int, queries: Queries, keys: Keys) -> PyTree:
  return _forward(axis, size, queries, keys)[0]


def _forward(
  axis: str, size: int, queries: Queries, keys: Keys
) -> tuple[jax.Array, tuple]:
  """Passes the keys around the ring; returns the output and the residuals."""
  first, second = _halves(queries)
  early, late = _halves(keys)
  attend = functools.partial(_attend, size=size)
  one = attend(first, early, causal=True)
  two = _join(attend(second, early), attend(second, late, causal=True))

  def body(state, step):
    one, two, keys = state
    following = _pass_on(keys, axis)  # overlaps with the attention to the current keys
    before = step <= jax.lax.axis_index(axis)
    early, late = _halves(keys)
    two = _join(two, attend(second, early))
    # Exactly one of the other three pairs of blocks has its keys before its queries.
    result = attend(_pick(before, first, second), _pick(before, early, late))
    joined = _join(_pick(before, one, two), result)
    one, two = _pick(before, joined, one), _pick(before, two, joined)
    return (one, two, following), None

  steps = jnp.arange(1, jax.lax.axis_size(axis))
  (one, two, _), _ = jax.lax.scan(body, (one, two, _pass_on(keys, axis)), steps)
  out = jnp.concatenate([one[0], two[0]], axis=3).astype(queries.q.dtype)
  weight = jnp.concatenate([one[1], two[1]], axis=3)
  return out, (queries, keys, out, weight)


def _backward(axis: str, size: int, kept: tuple, gradient: jax.Array) -> tuple:
  """Passes the keys around the ring again, and computes the gradients.

  The gradients of a block of keys are passed along with the block. After the last step
  they are back on the device that holds the block.
  """
  queries, keys, out, weight = kept
  share = (gradient.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
  ends = _halves((gradient, weight, share), axis=3)
  first: PyTree
  second: PyTree
  first, second = zip(_halves(queries), ends, strict=True)
  early, late = _halves(keys)
  slope = functools.partial(_slope, size=size)
  one, of_early = slope(first, early, causal=True)
  two, more = slope(second, early)
  last, of_late = slope(second, late, causal=True)
  two, home = two + last, _add((of_early, of_late), (more, None))

  def body(state, step):
    one, two, keys, owed = state
    following = _pass_on(keys, axis)
    before = step <= jax.lax.axis_index(axis)
    early, late = _halves(keys)
    change, of_early = slope(second, early)
    q_grad, of_one = slope(_pick(before, first, second), _pick(before, early, late))
    one = one + jnp.where(before, q_grad, 0)
    two = two + change + jnp.where(before, 0, q_grad)
    owed = _add(owed, (of_early, None))
    nothing = jax.tree.map(jnp.zeros_like, of_one)
    owed = _add(owed, (_pick(before, of_one, nothing), _pick(before, nothing, of_one)))
    return (one, two, following, _pass_on(owed, axis)), None

  nothing = jax.tree.map(jnp.zeros_like, home)
  steps = jnp.arange(1, jax.lax.axis_size(axis))
  start = one, two, _pass_on(keys, axis), nothing
  (one, two, _, owed), _ = jax.lax.scan(body, start, steps)
  (k_early, v_early), (k_late, v_late) = _add(home, owed)
  of_q = jnp.concatenate([one, two], axis=3).astype(queries.q.dtype)
  of_k = jnp.concatenate([k_early, k_late], axis=2).astype(keys.k.dtype)
  of_v = jnp.concatenate([v_early, v_late], axis=2).astype(keys.v.dtype)
  return Queries(of_q, None), Keys(of_k, of_v, None)  # pyright: ignore


_ring.defvjp(_forward, _backward)


def _attend(queries: Queries, keys: Keys, *, size: int, causal: bool = False) -> State:
  """Computes attention of a block of queries to a block of keys.

  If a query attends to no key of the block, its logsumexp is so small that the output
  gets weight 0 when it is combined with another one.

  Args:
    queries: Block of queries.
    keys: Block of keys and values.
    size: Number of queries whose scores are held at a time.
    causal: Whether both are the same block of the row. If not, all keys must come
      before the queries.
  """

  def body(_, chunk):
    q, seen, time = chunk
    scores = _scores(q, seen, time, keys, causal)
    top = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = weights.sum(-1)
    out = jnp.einsum(
      'bkgts,bksd->bkgtd',
      weights.astype(keys.v.dtype),
      keys.v,
      preferred_element_type=jnp.float32,
    )
    return None, (out / total[..., None], top[..., 0] + jnp.log(total))

  _, results = jax.lax.scan(body, None, _cut(queries, size))
  return _whole(results[0]), _whole(results[1])


def _slope(
  stretch: tuple[Queries, tuple[jax.Array, jax.Array, jax.Array]],
  keys: Keys,
  *,
  size: int,
  causal: bool = False,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  """Computes the gradients of `_attend` for one block of queries and one of keys.

  Args:
    stretch: Block of queries, with three arrays: the gradient of the output
      `[B, K, g, t, d]`, the logsumexp over all keys `[B, K, g, t]`, and the sum of
      gradient · output over d, `[B, K, g, t]`.
    keys: Block of keys and values.
    size: As in `_attend`.
    causal: As in `_attend`.

  Returns:
    The gradient of q, and the gradients (of k, of v), in float32.
  """
  queries, ends = stretch
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  dtype, scale = keys.k.dtype, keys.k.shape[-1] ** -0.5

  def body(total, chunk):
    (q, seen, time), (gradient, weight, share) = chunk
    weights = jnp.exp(_scores(q, seen, time, keys, causal) - weight[..., None])
    of_v = product('bkgts,bkgtd->bksd', weights.astype(dtype), gradient)
    change = product('bkgtd,bksd->bkgts', gradient, keys.v) - share[..., None]
    change = (weights * change * scale).astype(dtype)
    of_k = product('bkgts,bkgtd->bksd', change, q)
    of_q = product('bkgts,bksd->bkgtd', change, keys.k)
    return (total[0] + of_k, total[1] + of_v), of_q

  start = (jnp.zeros(keys.k.shape), jnp.zeros(keys.v.shape))
  chunks = _cut(queries, size), tuple(_split(x, size, 3) for x in ends)
  total, of_q = jax.lax.scan(body, start, chunks)
  return _whole(of_q), total


def _scores(
  q: jax.Array, seen: jax.Array, time: jax.Array, keys: Keys, causal: bool
) -> jax.Array:
  """Computes scores `[B, K, g, t, s]` float32; NEGATIVE for masked keys."""
  visible = (seen[..., None] == keys.ids[:, None, None]).any(2)  # [B, t, s]
  if causal:
    visible &= time[:, None] >= jnp.arange(keys.ids.shape[1])
  q = q * q.shape[-1] ** -0.5
  scores = jnp.einsum(
    'bkgtd,bksd->bkgts', q, keys.k, preferred_element_type=jnp.float32
  )
  return jnp.where(visible[:, None, None], scores, NEGATIVE)


def _join(one: State, two: State) -> State:
  weight = jnp.logaddexp(one[1], two[1])
  parts = (out * jnp.exp(w - weight)[..., None] for out, w in (one, two))
  return sum(parts, start=jnp.zeros(())), weight


def _pick(condition: jax.Array, one: PyTree, two: PyTree) -> PyTree:
  return jax.tree.map(lambda x, y: jnp.where(condition, x, y), one, two)


def _add(one: tuple, two: tuple) -> tuple:
  """Adds the gradients of the early and the late keys; None stands for zero."""
  return tuple(
    x if y is None else jax.tree.map(jnp.add, x, y)
    for x, y in zip(one, two, strict=True)
  )


def _pass_on(x: PyTree, axis: str) -> PyTree:
  """Sends `x` from every device to the next device in the ring."""
  count = jax.lax.axis_size(axis)
  ring = [(i, (i + 1) % count) for i in range(count)]
  return jax.tree.map(lambda y: jax.lax.ppermute(y, axis, ring), x)


def _halves(x: PyTree, axis: int = 0) -> tuple[PyTree, PyTree]:
  """Splits the arrays of queries, keys or a tuple into an early and a late half."""
  axes = {Queries: Queries(3, 1), Keys: Keys(2, 2, 1)}.get(type(x))  # pyright: ignore
  if axes is None:
    axes = (axis,) * len(x)
  cut = [jnp.split(y, 2, axis=n) for y, n in zip(x, axes, strict=True)]
  make = type(x) if hasattr(x, '_fields') else lambda *parts: parts
  return make(*(part[0] for part in cut)), make(*(part[1] for part in cut))


def _cut(queries: Queries, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Splits queries into chunks of `size`; chunks are the first axis of each array.

  Returns:
    The queries, the segments that they attend to, and their columns in the block.
  """
  time = jnp.arange(queries.seen.shape[1]).reshape(-1, size)
  return _split(queries.q, size, 3), _split(queries.seen, size, 1), time


def _split(x: jax.Array, size: int, axis: int) -> jax.Array:
  shape = (*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
  return jnp.moveaxis(x.reshape(shape), axis, 0)


def _whole(x: jax.Array) -> jax.Array:
  """Joins chunks `[n, B, K, g, size, …]` to `[B, K, g, n · size, …]`."""
  x = jnp.moveaxis(x, 0, 3)
  return x.reshape(*x.shape[:3], -1, *x.shape[5:])
