"""Fused log-probs compute token log-probs from tiles of the LM head's matmul.

On TPU, logits are never written to the main memory. On GPU, a tile of them is at a
time, and their softmax may be kept for the backward pass. The function has a custom
gradient, and supports a table that is sharded over the vocabulary.
"""

import dataclasses
import functools
import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kernels.kept_softmax import KeptSoftmax
from kernels.softmax_stats import (
  BackwardStats,
  SoftmaxStats,
  StatsKind,
  backward_stats,
  merge_stats,
  scores_from_stats,
)

# Imported on first use: Pallas takes half a second.
MODULES = {
  'mosaic': 'kernels.fused_logprobs_tpu',
  'kept': 'kernels.kept_softmax',
  'native': 'kernels.native.row_softmax',
  'tiles': 'kernels.kept_softmax',
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
    name: Name of the implementation: 'mosaic', 'kept', 'tiles' or 'native'.
    kind: Statistics to compute.
    shards: Sharding of the arrays; None for one device.
    rows: Rows whose logits are formed again at a time, where they must be; not by
      'mosaic'.
    interpret: Whether to run kernels in Pallas's interpreter, without an accelerator.
  """

  name: str
  kind: StatsKind
  shards: LogprobShards | None = None
  rows: int = 0
  interpret: bool = False

  @property
  def functions(self) -> Any:
    """Returns the module of the implementation."""
    return importlib.import_module(MODULES[self.name])

  @property
  def keeps(self) -> bool:
    """Returns True if the softmax is kept for the backward pass."""
    return self.name in ('kept', 'native')

  @property
  def forward_options(self) -> dict[str, Any]:
    """Returns the options of the forward pass that only this implementation has."""
    return {'interpret': self.interpret} if self.name == 'mosaic' else {}

  @property
  def backward_options(self) -> dict[str, Any]:
    """Returns the options of `gradients` that only this implementation has."""
    return self.forward_options or {'rows': self.rows}

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
        number per token, 'k' for what is kept of each token and part of the
        vocabulary, 's' for a scalar.
    """
    assert self.shards is not None
    batch, length = self.shards.batch or None, self.shards.length or None
    vocab = self.shards.vocab or None
    return {
      'h': P(batch, length, None),
      'v': P(vocab, None),
      'r': P(batch, length),
      'k': P(batch, length, vocab),
      's': P(),
    }[letter]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_logprobs(
  plan: FusedLogprobsPlan,
  hidden: jax.Array,
  table: jax.Array,
  targets: jax.Array,
  inverse: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Computes log-probs, entropy, nec, and Σ p², which has no gradient.

  Args:
    plan: Static options.
    hidden: Hidden states `[B, T, D]`.
    table: Table `[V, D]`.
    targets: Target tokens `[B, T]` int32.
    inverse: Inverse temperature 1/τ, a float32 scalar.

  Returns:
    Four arrays `[B, T]`. The last three are 0 unless `plan.kind.moments`.
  """
  return _run(plan, hidden, table, targets, inverse, keeps=False)[0]


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
  plan: FusedLogprobsPlan,
  hidden: jax.Array,
  table: jax.Array,
  targets: jax.Array,
  inverse: jax.Array,
  *,
  keeps: bool,
) -> Any:
  """Returns the four outputs, the statistics, and what is kept for the gradient."""
  compute = plan.functions.keep_softmax if keeps else plan.functions.softmax_stats

  def run(hidden, table, targets, inverse):
    shape, rows = targets.shape, hidden.reshape(-1, hidden.shape[-1])
    local = _local(plan, targets, table)
    stats = compute(rows, table, local, inverse, kind=plan.kind, **plan.forward_options)
    stats, kept = stats if keeps else (stats, ())
    if plan.shards is not None and plan.shards.size(plan.shards.vocab) > 1:
      parts = jax.lax.all_gather(jnp.stack(stats), plan.shards.vocab)
      parts = [SoftmaxStats(*part) for part in parts]
      stats = functools.reduce(functools.partial(merge_stats, inverse=inverse), parts)
    out = scores_from_stats(stats, inverse)
    numbers = (x.reshape(shape) for x in (*out, *stats))
    return *numbers, *(x.reshape(*shape, -1) for x in kept)

  outputs = 'r' * 12 + ('kk' if keeps else '')
  out = plan.shard_map(run, 'hvrs', outputs)(hidden, table, targets, inverse)
  return out[:4], out[4:12], out[12:]


def _forward(plan: FusedLogprobsPlan, *primals: Any) -> Any:
  arrays = tuple(x.value for x in primals)
  out, stats, kept = _run(plan, *arrays, keeps=plan.keeps)
  return out, (arrays, stats, kept)


def _backward(plan: FusedLogprobsPlan, rest: Any, by: Any) -> Any:
  (hidden, table, targets, inverse), stats, kept = rest
  kind, by = plan.kind, by[:3]
  if all(isinstance(x, SymbolicZero) for x in by[1:]):
    kind = kind._replace(moments=False)  # entropy and nec are metrics alone
  by = [jnp.zeros(x.shape) if isinstance(x, SymbolicZero) else x for x in by]

  def run(hidden, table, targets, inverse, *rest):
    rows = hidden.reshape(-1, hidden.shape[-1])
    by, own_stats = rest[:3], SoftmaxStats(*(x.reshape(-1, 1) for x in rest[3:11]))
    of, tau = backward_stats(own_stats, inverse, tuple(x.reshape(-1) for x in by))
    shards = plan.shards
    split = shards is not None and shards.size(shards.vocab) > 1
    apart = shards is not None and shards.size(shards.batch + shards.length) > 1
    dtypes = (
      jnp.float32 if split else hidden.dtype,
      jnp.float32 if apart else table.dtype,
    )
    arrays = rows, table, _local(plan, targets, table), inverse, BackwardStats(*of)
    if kept and not kind.moments:
      own = KeptSoftmax(*(x.reshape(len(rows), -1) for x in rest[11:]))
      options = {'chosen': own_stats.chosen, 'dtypes': dtypes}
      grads = plan.functions.kept_gradients(*arrays, own, **options)
    else:
      options = plan.backward_options | {'kind': kind, 'dtypes': dtypes}
      grads = plan.functions.gradients(*arrays, **options)
    of_hidden, of_table = grads
    if shards is not None and split:
      of_hidden = jax.lax.psum(of_hidden, shards.vocab)
    if shards is not None and apart:
      of_table, tau = jax.lax.psum((of_table, tau), shards.batch + shards.length)
    of_hidden = of_hidden.astype(hidden.dtype).reshape(hidden.shape)
    return of_hidden, of_table.astype(table.dtype), tau

  arrays = (hidden, table, targets, inverse, *by, *stats, *kept)
  run = plan.shard_map(run, 'hvrs' + 'r' * 11 + 'k' * len(kept), 'hvs')
  of_hidden, of_table, tau = run(*arrays)
  # `tau` is the gradient of τ = 1 / inverse, so that of inverse is −tau / inverse².
  return of_hidden, of_table, None, -tau / jnp.square(inverse)


fused_logprobs.defvjp(_forward, _backward, symbolic_zeros=True)
