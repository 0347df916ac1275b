"""Fused log-probs compute token log-probs inside the matmul of the LM head.

Logits never leave the chip. The function has its own gradient, and supports a table
that is sharded over the vocabulary.
"""

import dataclasses
import functools
import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kernels.softmax_stats import (
  BackwardStats,
  SoftmaxStats,
  StatsKind,
  backward_stats,
  merge_stats,
  scores_from_stats,
)

MODULES = {
  'mosaic': 'kernels.fused_logprobs_tpu',
  'triton': 'kernels.fused_logprobs_gpu',
}


@dataclasses.dataclass(frozen=True)
class LogprobShards:
  """How states `[B, T, D]` and table `[V, D]` are sharded over a mesh. Hashable.

  Attributes:
    mesh: The mesh.
    batch: The mesh axes of B.
    length: The mesh axes of T.
    vocab: The mesh axes of V; all else is whole, or made so.
  """

  mesh: Mesh
  batch: tuple[str, ...] = ()
  length: tuple[str, ...] = ()
  vocab: tuple[str, ...] = ()

  def size(self, axes: tuple[str, ...]) -> int:
    """Returns the number of devices along axes.

    Args:
      axes: Mesh axes.
    """
    return math.prod(self.mesh.shape[axis] for axis in axes)

  def obstacle(self, hidden: jax.Array, table: jax.Array) -> str:
    """Returns why these cannot be sharded so; '' if they can.

    Args:
      hidden: `[B, T, D]`.
      table: `[V, D]`.
    """
    names = {'rows': self.batch, 'tokens': self.length, 'entries': self.vocab}
    sizes = (*hidden.shape[:2], len(table))
    for (name, axes), size in zip(names.items(), sizes, strict=True):
      if size % self.size(axes):
        return f'needs {name} that mesh axes {axes} divide, not {size}'
    return ''


@dataclasses.dataclass(frozen=True)
class FusedLogprobsPlan:
  """What is compiled.

  Attributes:
    name: 'mosaic' or 'triton'.
    kind: What is asked for.
    shards: How the arrays are sharded; None for one device.
    interpret: Whether kernels are interpreted.
  """

  name: str
  kind: StatsKind
  shards: LogprobShards | None = None
  interpret: bool = False

  @property
  def kernel_module(self) -> Any:
    """Imports the kernels, which takes Pallas half a second."""
    return importlib.import_module(MODULES[self.name])  # Pallas: half a second

  def shard_map(self, function: Any, inputs: str, outputs: str) -> Any:
    """Returns a function that runs on each device with its shares.

    Args:
      function: The function.
      inputs: A letter of `_spec` per array.
      outputs: Likewise.
    """
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
def fused_logprobs(
  plan: FusedLogprobsPlan,
  hidden: jax.Array,
  table: jax.Array,
  targets: jax.Array,
  inverse: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Computes log-probs, entropy and nec.

  Args:
    plan: What is compiled.
    hidden: `[B, T, D]`.
    table: `[V, D]`.
    targets: `[B, T]` int32.
    inverse: 1/τ, a float32 scalar.

  Returns:
    Three arrays `[B, T]`, the last two 0 unless `plan.kind.moments`.
  """
  return _run(plan, hidden, table, targets, inverse)[0]


def _local(plan: FusedLogprobsPlan, targets: jax.Array, table: jax.Array) -> jax.Array:
  """Numbers targets `[B, T]` from this device's first entry of the table, as `[N]`.

  Those of other devices are −1, so that they are not found where blocks reach past the
  end of the table.
  """
  targets = targets.reshape(-1)
  if plan.shards is not None and plan.shards.size(plan.shards.vocab) > 1:
    targets = targets - jax.lax.axis_index(plan.shards.vocab) * len(table)
  return jnp.where((targets >= 0) & (targets < len(table)), targets, -1)


def _run(
  plan: FusedLogprobsPlan, hidden: Any, table: Any, targets: Any, inverse: Any
) -> Any:
  def run(hidden, table, targets, inverse):
    shape, rows = targets.shape, hidden.reshape(-1, hidden.shape[-1])
    stats = plan.kernel_module.softmax_stats(
      rows,
      table,
      _local(plan, targets, table),
      inverse,
      kind=plan.kind,
      interpret=plan.interpret,
    )
    if plan.shards is not None and plan.shards.size(plan.shards.vocab) > 1:
      parts = jax.lax.all_gather(jnp.stack(stats), plan.shards.vocab)
      parts = [SoftmaxStats(*part) for part in parts]
      stats = functools.reduce(functools.partial(merge_stats, inverse=inverse), parts)
    out = scores_from_stats(stats, inverse)
    return tuple(x.reshape(shape) for x in (*out, *stats))

  out = plan.shard_map(run, 'hvrs', 'r' * 11)(hidden, table, targets, inverse)
  return out[:3], out[3:]


def _forward(plan: FusedLogprobsPlan, *arrays: jax.Array) -> Any:
  out, stats = _run(plan, *arrays)
  return out, (arrays, stats)


def _backward(plan: FusedLogprobsPlan, kept: Any, by: Any) -> Any:
  (hidden, table, targets, inverse), stats = kept

  def run(hidden, table, targets, inverse, *rest):
    rows = hidden.reshape(-1, hidden.shape[-1])
    by, local_stats = rest[:3], SoftmaxStats(*(x.reshape(-1, 1) for x in rest[3:]))
    of, tau = backward_stats(local_stats, inverse, tuple(x.reshape(-1) for x in by))
    shards = plan.shards
    split = shards is not None and shards.size(shards.vocab) > 1
    apart = shards is not None and shards.size(shards.batch + shards.length) > 1
    dtypes = (
      jnp.float32 if split else hidden.dtype,
      jnp.float32 if apart else table.dtype,
    )
    of_hidden, of_table = plan.kernel_module.gradients(
      rows,
      table,
      _local(plan, targets, table),
      inverse,
      BackwardStats(*of),
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

  arrays = (hidden, table, targets, inverse, *by, *stats)
  run = plan.shard_map(run, 'hvrs' + 'r' * 11, 'hvs')
  of_hidden, of_table, tau = run(*arrays)
  # τ = 1 / inverse, and tau is the slope of τ: d/d inverse = −tau / inverse².
  return of_hidden, of_table, None, -tau / jnp.square(inverse)


fused_logprobs.defvjp(_forward, _backward)
