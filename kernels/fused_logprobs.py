"""Log-probs whose logits stay on the chip: gradients, and shards of the table."""

import dataclasses
import functools
import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kernels.vocabulary import Kind, Slopes, Sums, finish, merge, slopes

MODULES = {'mosaic': 'kernels.vocabulary_tpu', 'triton': 'kernels.vocabulary_gpu'}


@dataclasses.dataclass(frozen=True)
class Shards:
  """How states `[B, T, D]` and table `[V, D]` are split over a mesh. Hashable.

  batch, length, vocab: the mesh axes of B, T and V; all else is whole, or made so.
  """

  mesh: Mesh
  batch: tuple[str, ...] = ()
  length: tuple[str, ...] = ()
  vocab: tuple[str, ...] = ()

  def size(self, axes: tuple[str, ...]) -> int:
    return math.prod(self.mesh.shape[axis] for axis in axes)

  def refuses(self, hidden: jax.Array, table: jax.Array) -> str:
    """Why these cannot be split so; '' if they can."""
    names = {'rows': self.batch, 'tokens': self.length, 'entries': self.vocab}
    sizes = (*hidden.shape[:2], len(table))
    for (name, axes), size in zip(names.items(), sizes, strict=True):
      if size % self.size(axes):
        return f'needs {name} that mesh axes {axes} divide, not {size}'
    return ''


@dataclasses.dataclass(frozen=True)
class Plan:
  """What is compiled: kernels of which kind, where, and what for."""

  name: str
  kind: Kind
  shards: Shards | None = None
  interpret: bool = False

  @property
  def ops(self) -> Any:
    return importlib.import_module(MODULES[self.name])  # Pallas: half a second

  def spread(self, function: Any, inputs: str, outputs: str) -> Any:
    """function, on each device with its shares; per array one letter of `_spec`."""
    if self.shards is None:
      return function
    return jax.shard_map(
      function,
      mesh=self.shards.mesh,
      in_specs=tuple(self._spec(x) for x in inputs),
      out_specs=tuple(self._spec(x) for x in outputs),
      check_vma=False,
    )

  def _spec(self, letter: str) -> P:
    """h: states. v: table. r: one number a token. s: a scalar."""
    assert self.shards is not None
    batch, length = self.shards.batch or None, self.shards.length or None
    specs = {'h': P(batch, length, None), 'r': P(batch, length), 's': P()}
    return P(self.shards.vocab or None, None) if letter == 'v' else specs[letter]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused(
  plan: Plan,
  hidden: jax.Array,
  table: jax.Array,
  targets: jax.Array,
  inverse: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """hidden `[B, T, D]`, table `[V, D]`, targets `[B, T]`, inverse temperature scalar →
  log-probs, entropy and nec `[B, T]`, the last two 0 unless `plan.kind.moments`.
  """
  return _run(plan, hidden, table, targets, inverse)[0]


def _local(plan: Plan, targets: jax.Array, table: jax.Array) -> jax.Array:
  """Targets `[B, T]` → `[N]`, counted from this device's first entry of the table; −1
  for those of others, lest they be found where blocks reach past the end of the table.
  """
  targets = targets.reshape(-1)
  if plan.shards is not None and plan.shards.size(plan.shards.vocab) > 1:
    targets = targets - jax.lax.axis_index(plan.shards.vocab) * len(table)
  return jnp.where((targets >= 0) & (targets < len(table)), targets, -1)


def _run(plan: Plan, hidden: Any, table: Any, targets: Any, inverse: Any) -> Any:
  def run(hidden, table, targets, inverse):
    shape, rows = targets.shape, hidden.reshape(-1, hidden.shape[-1])
    found = plan.ops.total(
      rows,
      table,
      _local(plan, targets, table),
      inverse,
      kind=plan.kind,
      interpret=plan.interpret,
    )
    if plan.shards is not None and plan.shards.size(plan.shards.vocab) > 1:
      parts = jax.lax.all_gather(jnp.stack(found), plan.shards.vocab)
      parts = [Sums(*part) for part in parts]
      found = functools.reduce(functools.partial(merge, inverse=inverse), parts)
    out = finish(found, inverse)
    return tuple(x.reshape(shape) for x in (*out, *found))

  out = plan.spread(run, 'hvrs', 'r' * 11)(hidden, table, targets, inverse)
  return out[:3], out[3:]


def _forward(plan: Plan, *given: jax.Array) -> Any:
  out, found = _run(plan, *given)
  return out, (given, found)


def _backward(plan: Plan, kept: Any, by: Any) -> Any:
  (hidden, table, targets, inverse), found = kept

  def run(hidden, table, targets, inverse, *rest):
    rows = hidden.reshape(-1, hidden.shape[-1])
    by, found = rest[:3], Sums(*(x.reshape(-1, 1) for x in rest[3:]))
    of, tau = slopes(found, inverse, tuple(x.reshape(-1) for x in by))
    shards = plan.shards
    split = shards is not None and shards.size(shards.vocab) > 1
    apart = shards is not None and shards.size(shards.batch + shards.length) > 1
    dtypes = (
      jnp.float32 if split else hidden.dtype,
      jnp.float32 if apart else table.dtype,
    )
    of_hidden, of_table = plan.ops.gradients(
      rows,
      table,
      _local(plan, targets, table),
      inverse,
      Slopes(*of),
      kind=plan.kind,
      dtypes=dtypes,
      interpret=plan.interpret,
    )
    if shards is not None and split:
      of_hidden = jax.lax.psum(of_hidden, shards.vocab)
    if shards is not None and apart:
      of_table, tau = jax.lax.psum((of_table, tau), shards.batch + shards.length)
    of_hidden = of_hidden.astype(hidden.dtype).reshape(hidden.shape)
    return of_hidden, of_table.astype(table.dtype), tau

  given = (hidden, table, targets, inverse, *by, *found)
  run = plan.spread(run, 'hvrs' + 'r' * 11, 'hvs')
  of_hidden, of_table, tau = run(*given)
  # τ = 1 / inverse, and tau is the slope of τ: d/d inverse = −tau / inverse².
  return of_hidden, of_table, None, -tau / jnp.square(inverse)


fused.defvjp(_forward, _backward)
