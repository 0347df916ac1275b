"""Ring attention over a length that is sharded over devices.

Of n devices, device i holds of every row the stretches i and 2n − 1 − i of its 2n equal
ones, so that each has the same causal work to do. Keys and values travel around the
ring n − 1 times; a running softmax combines the results (Liu et al. 2023, Ring
Attention; Brandon et al. 2023, Striped Attention, for the balance). A device holds the
scores of `block` queries against one stretch at a time, and nothing else that grows
faster than its own share of the length. The backward pass computes them anew.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.attention import NEGATIVE

State = tuple[
  jax.Array, jax.Array
]  # out [B, K, g, t, d], log of its weight [B, K, g, t]


class Queries(NamedTuple):
  """A stretch of queries.

  Attributes:
    q: `[B, K, g, t, d]`.
    seen: `[B, t, S]`, the segments it sees.
  """

  q: jax.Array
  seen: jax.Array


class Keys(NamedTuple):
  """A stretch of keys.

  Attributes:
    k: `[B, K, s, d]`.
    v: `[B, K, s, e]`.
    ids: `[B, s]`, their segments.
  """

  k: jax.Array
  v: jax.Array
  ids: jax.Array


def zigzag(x: jax.Array, devices: int) -> jax.Array:
  """Rearranges rows so that a device's stretches are its rows.

  Device i's rows are i · B to (i + 1) · B.

  Args:
    x: `[B, T, …]`, T a multiple of 2 · devices.
    devices: The number of devices.

  Returns:
    `[devices · B, T / devices, …]`.
  """
  batch, length = x.shape[:2]
  x = x.reshape(batch, 2, devices, length // (2 * devices), *x.shape[2:])
  x = jnp.stack([x[:, 0], x[:, 1, ::-1]], axis=2)  # [B, n, 2, t, …]
  return x.swapaxes(0, 1).reshape(devices * batch, -1, *x.shape[4:])


def unzigzag(x: jax.Array, devices: int) -> jax.Array:
  """Undoes `zigzag`.

  Args:
    x: Its result.
    devices: The number of devices.
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
  """Computes `kernels.attention.attention` for this device's stretches.

  Call it inside `jax.shard_map` over mesh axis `axis`, with arrays as `zigzag` arranges
  them.

  Args:
    q: `[B, t, H, d]`, t even.
    k: `[B, t, K, d]`.
    v: `[B, t, K, e]`.
    segment_ids: `[B, t]` int32.
    axis: The mesh axis.
    prefix_ids: `[B, t]` int32, or None.
    block: Queries whose scores are held at a time.

  Returns:
    `[B, t, H, e]`.
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
  """The largest divisor of `length` that is at most `block`."""
  return next(size for size in range(min(length, block), 0, -1) if length % size == 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(axis: str, size: int, queries: Queries, keys: Keys) -> Any:
  return _forward(axis, size, queries, keys)[0]


def _forward(
  axis: str, size: int, queries: Queries, keys: Keys
) -> tuple[jax.Array, tuple]:
  """The ring once around. Returns the output and what the backward pass needs."""
  first, second = _halves(queries)
  early, late = _halves(keys)
  attend = functools.partial(_attend, size=size)
  one = attend(first, early, causal=True)
  two = _join(attend(second, early), attend(second, late, causal=True))

  def body(state, step):
    one, two, keys = state
    following = _pass_on(keys, axis)  # travels while these are attended to
    before = step <= jax.lax.axis_index(axis)
    early, late = _halves(keys)
    two = _join(two, attend(second, early))
    # Of the other three pairs of stretches one has the keys before the queries.
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
  """Around once more; the keys' gradients travel with them and come home."""
  queries, keys, out, weight = kept
  share = (gradient.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
  ends = _halves((gradient, weight, share), axis=3)
  first: Any
  second: Any
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
  """One stretch of queries on one of keys, `size` queries at a time.

  causal: they are the same stretch; or else all keys lie before the queries. A query
  that sees none has a weight that vanishes beside any other's.
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
  """The gradients of q, and of (k, v), float32, of one stretch on another.

  stretch: the queries; the output's gradient `[B, K, g, t, d]`, the log of the sum of
  all weights and the sum of gradient · output `[B, K, g, t]`.
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
  """`[B, K, g, t, s]` float32; NEGATIVE where a key is not seen."""
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


def _pick(condition: jax.Array, one: Any, two: Any) -> Any:
  return jax.tree.map(lambda x, y: jnp.where(condition, x, y), one, two)


def _add(one: tuple, two: tuple) -> tuple:
  """Gradients of the early and the late keys, added; None adds nothing."""
  return tuple(
    x if y is None else jax.tree.map(jnp.add, x, y)
    for x, y in zip(one, two, strict=True)
  )


def _pass_on(x: Any, axis: str) -> Any:
  """Every device's `x` to the next one."""
  count = jax.lax.axis_size(axis)
  ring = [(i, (i + 1) % count) for i in range(count)]
  return jax.tree.map(lambda y: jax.lax.ppermute(y, axis, ring), x)


def _halves(x: Any, axis: int = 0) -> tuple[Any, Any]:
  """The early and the late half of each array of queries, keys or a tuple."""
  axes = {Queries: Queries(3, 1), Keys: Keys(2, 2, 1)}.get(type(x))  # pyright: ignore
  if axes is None:
    axes = (axis,) * len(x)
  cut = [jnp.split(y, 2, axis=n) for y, n in zip(x, axes, strict=True)]
  make = type(x) if hasattr(x, '_fields') else lambda *parts: parts
  return make(*(part[0] for part in cut)), make(*(part[1] for part in cut))


def _cut(queries: Queries, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(q, seen, time) in chunks of `size` queries, chunks first."""
  time = jnp.arange(queries.seen.shape[1]).reshape(-1, size)
  return _split(queries.q, size, 3), _split(queries.seen, size, 1), time


def _split(x: jax.Array, size: int, axis: int) -> jax.Array:
  shape = (*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
  return jnp.moveaxis(x.reshape(shape), axis, 0)


def _whole(x: jax.Array) -> jax.Array:
  """Chunks `[n, B, K, g, size, …]` → `[B, K, g, n · size, …]`."""
  x = jnp.moveaxis(x, 0, 3)
  return x.reshape(*x.shape[:3], -1, *x.shape[5:])
