"""Forward passes over a batch in parts, on its rectangle or on packed rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models import rectangle
from jaxrl.models.model import Model
from jaxrl.training import sharding
from jaxrl.training.columns import IDS, Columns, by_rows, in_chunks
from jaxrl.training.packing import Plan
from jaxrl.training.state import Spec
from jaxrl.types import Array, Params, PolicyOutputs, Rows
from kernels.dispatch import platform_of


def outputs(
  model: Model,
  params: Params,
  tokens: Array,
  segment_ids: Array,
  routed: Array | None = None,
  rows: Rows | None = None,
  *,
  topk_ids: Array | None = None,
  **asked: Any,
) -> PolicyOutputs:
  """`model.policy_outputs` of tokens `[B, T]`, computed on packed rows if given.

  routed: `[B, T, L, k]`, experts to take. What lies in no slot is 0, and so are tokens
  that their own sequence's first action does not come before: the last one of a shared
  prompt, and, where it is shared, all of it.
  """
  of_tokens = (('topk_ids', topk_ids, 0), ('routed_experts', routed, -1))
  given = {name: (x, fill) for name, x, fill in of_tokens if x is not None}
  if rows is None:
    asked |= {name: x for name, (x, _) in given.items()}
    return model.policy_outputs(params, tokens, segment_ids, **asked)
  there, origin = rows.origin >= 0, jnp.maximum(rows.origin, 0)

  def pack(x: Array, fill: int = 0) -> Array:
    flat = x.reshape(-1, *x.shape[2:])[origin]
    flat = jnp.where(there.reshape(there.shape + (1,) * (x.ndim - 2)), flat, fill)
    return model.constrain(flat, 'batch', 'length', *(None,) * (x.ndim - 2))

  packed = model.policy_outputs(
    params,
    pack(tokens),
    rows.segment_ids,
    prefix_ids=rows.prefix_ids,
    positions=rows.positions,
    **_rectangle(model, rows, segment_ids),
    **{name: pack(*own) for name, own in given.items()},
    **asked,
  )
  told, place = rows.place >= 0, jnp.maximum(rows.place, 0)

  def unpack(x: Array) -> Array:
    flat = x.reshape(-1, *x.shape[2:])[place]
    return jnp.where(told.reshape(told.shape + (1,) * (x.ndim - 2)), flat, 0)

  return jax.tree.map(unpack, packed)


def _rectangle(
  model: Model, rows: Rows, segment_ids: Array
) -> dict[str, rectangle.Rectangle]:
  """Where packed rows attend, by its name for the model, if not within themselves.

  That is where it is the lesser work, and one device has all rows: on several, what a
  row of the rectangle needs would lie on others.
  """
  mesh = getattr(model.constrain, 'mesh', None)
  whole = mesh is None or sharding.rows_multiple(mesh) == 1
  platform = platform_of(getattr(model, 'platform', None))
  if not whole or not rectangle.spares(rows, platform):
    return {}
  return {'rectangle': rectangle.of(rows, segment_ids)}


def in_parts(
  spec: Spec,
  parts: int | Plan,
  function: Callable[..., Any],
  tokens: Array,
  *more: Array | None,
) -> Any:
  """`function(tokens, *more, rows)`, a part of the rows `[N, T]` after the other.

  parts: so many of as many rows each, or those of a plan. Returns its arrays
  `[N, T, …]` joined.
  """
  arrays = tokens, *more
  if not isinstance(parts, Plan):
    unpacked = lambda *x: function(*x, None)  # noqa: E731
    return in_chunks(spec, parts, unpacked, *arrays)
  size, length = tokens.shape

  def part(i):
    chosen = jnp.maximum(parts.members[i], 0)
    own = jax.tree.map(lambda x: x[chosen], arrays)
    return function(*own, parts.rows(i, length))

  def body(i, found):
    members = parts.members[i]
    target = jnp.where(members < 0, size, members)  # beyond the end: dropped
    put = lambda f, x: f.at[target].set(x, mode='drop')  # noqa: E731
    return jax.tree.map(put, found, part(i))

  shapes = jax.eval_shape(part, 0)
  start = jax.tree.map(
    lambda x: by_rows(spec, jnp.zeros((size, *x.shape[1:]), x.dtype)), shapes
  )
  return jax.lax.fori_loop(0, parts.count, body, start)


def accumulate(
  spec: Spec,
  plan: Plan,
  function: Callable[[Columns, Any], tuple[Params, Any]],
  params: Params,
  columns: Columns,
  weights: Any,
) -> tuple[Params, Any]:
  """Sums `function(columns, weights) -> (gradients, sums)` over a plan's micro-batches.

  columns, weights: of the minibatch's rows `[N, …]`. How many micro-batches there are
  is known at run time alone: one program serves any number.
  """
  start = nothing(spec, plan, function, params, columns, weights)

  def add(i, total):
    return jax.tree.map(jnp.add, total, one(spec, plan, function, columns, weights, i))

  return jax.lax.fori_loop(0, plan.count, add, start)


def one(
  spec: Spec,
  plan: Plan,
  function: Callable[[Columns, Any], tuple[Params, Any]],
  columns: Columns,
  weights: Any,
  i: Any,
) -> tuple[Params, Any]:
  """`function` of micro-batch `i` of a plan; the others as in `accumulate`."""
  of, share = members(spec, columns, weights, plan.members[i])
  rows = plan.rows(i, columns['tokens'].shape[1])
  own = {'rows': rows, 'parts': plan.count.astype(jnp.float32)}
  return function(of | own, share)


def nothing(
  spec: Spec,
  plan: Plan,
  function: Callable[[Columns, Any], tuple[Params, Any]],
  params: Params,
  columns: Columns,
  weights: Any,
) -> tuple[Params, Any]:
  """What `accumulate` has before any micro-batch: zeros."""
  shapes = jax.eval_shape(lambda: one(spec, plan, function, columns, weights, 0))[1]
  sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  return jax.tree.map(jnp.zeros_like, params), sums


def members(
  spec: Spec, columns: Columns, weights: Any, index: Array
) -> tuple[Columns, Any]:
  """Rows `index` `[B]` of columns and weights; −1 makes a row that counts nowhere."""
  there = index >= 0
  taken, share = jax.tree.map(
    lambda x: by_rows(spec, x[jnp.maximum(index, 0)]), (columns, weights)
  )
  for name in (*IDS, 'step_ids'):
    if taken.get(name) is not None:
      taken[name] = jnp.where(there, taken[name], -1)
  taken['mask'] &= there[:, None]

  def kept(x):
    return jnp.where(there.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)

  return taken, jax.tree.map(kept, share)
