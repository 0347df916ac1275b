"""Fused log-probs compute token log-probs inside the matmul of the LM head.

Logits are never written to the accelerator's main memory. The function has a custom
gradient, and supports a table that is sharded over the vocabulary.
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
  """The sharding of hidden states `[B, T, D]` and table `[V, D]` on a mesh. Hashable.

  D is not sharded; arrays whose D is sharded are gathered.

  Attributes:
    mesh: The mesh.
    batch: Mesh axes that shard B.
    length: Mesh axes that shard T.
    vocab: Mesh axes that shard V.
  """

  mesh: Mesh
  batch: tuple[str, ...] = ()
  length: tuple[str, ...] = ()
  vocab: tuple[str, ...] = ()

  def size(self, axes: tuple[str, ...]) -> int:
    """Returns the number of devices along mesh axes.

    Args:
      axes: Names of the mesh axes.
    """
    return math.prod(self.mesh.shape[axis] for axis in axes)

  def obstacle(self, hidden: jax.Array, table: jax.Array) -> str:
    """Returns why these arrays cannot be sharded like this; '' if they can.

    Args:
      hidden: Hidden states `[B, T, D]`.
      table: Table `[V, D]`.
    """
    names = {'rows': self.batch, 'tokens': self.length, 'entries': self.vocab}
    sizes = (*hidden.shape[:2], len(table))
    for (name, axes), size in zip(names.items(), sizes, strict=True):
      if size % self.size(axes):
        return f'needs {name} that mesh axes {axes} divide, not {size}'
    return ''


@dataclasses.dataclass(frozen=True)
class FusedLogprobsPlan:
  """The static options of `fused_logprobs`.

  Attributes:
    name: Name of the kernel, 'mosaic' or 'triton'.
    kind: Statistics to compute.
    shards: Sharding of the arrays; None for one device.
    interpret: Whether to run kernels in Pallas's interpreter, without an accelerator.
  """

  name: str
  kind: StatsKind
  shards: LogprobShards | None = None
  interpret: bool = False

  @property
  def kernel_module(self) -> Any:
    """Returns the module of the kernels, which is imported on first use."""
    return importlib.import_module(MODULES[self.name])  # Pallas takes half a second

  def shard_map(self, function: Any, inputs: str, outputs: str) -> Any:
    """Returns a function that each device runs on its own shards.

    Args:
      function: Function of arrays that returns a tuple of arrays.
      inputs: Letter per input array, as in `_spec`.
      outputs: Letter per output array, as in `_spec`.
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
    """Returns the partition spec of an array.

    Args:
      letter: Kind of array: 'h' for hidden states, 'v' for the table, 'r' for one
        number per token, 's' for a scalar.
    """
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
    plan: Static options.
    hidden: Hidden states `[B, T, D]`.
    table: Table `[V, D]`.
    targets: Target tokens `[B, T]` int32.
    inverse: Inverse temperature 1/τ, a float32 scalar.

  Returns:
    Three arrays `[B, T]`. The last two are 0 unless `plan.kind.moments`.
  """
  return _run(plan, hidden, table, targets, inverse)[0]


def _local(plan: FusedLogprobsPlan, targets: jax.Array, table: jax.Array) -> jax.Array:
  """Converts targets `[B, T]` to indices `[N]` into this device's shard of the table.

  Targets on other devices become −1, so that they match no index where a block reaches
  past the end of the shard.
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
  # `tau` is the gradient of τ = 1 / inverse, so that of inverse is −tau / inverse².
  return of_hidden, of_table, None, -tau / jnp.square(inverse)


fused_logprobs.defvjp(_forward, _backward)
