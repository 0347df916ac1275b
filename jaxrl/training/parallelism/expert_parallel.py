"""Expert parallelism shards the experts of a mixture over the mesh's expert axis.

The tokens of the devices along the `expert` axis are gathered, each device computes
what its experts add to all of them, and the sums return to where the tokens came from
(one all-gather and one reduce-scatter per layer). However a router chooses, no token is
dropped, and no device waits for a buffer larger than the tokens at hand times k.
"""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxrl.models import moe
from jaxrl.training.parallelism.sharding import LOGICAL_AXIS_RULES
from kernels.experts import Adapted, Biased, Matrix


@dataclasses.dataclass(frozen=True)
class ExpertParallel:
  """Computes a mixture of experts on a mesh, as `moe.local` does on a device; hashable.

  Rows that the mesh does not divide are computed on every device.

  Attributes:
    mesh: The devices.
  """

  mesh: Mesh

  def __call__(
    self,
    way: moe.ExpertFn,
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    *kernels: Matrix,
  ) -> jax.Array:
    """Computes the weighted sum of the chosen experts' outputs.

    Args:
      way: The implementation.
      x: `[B, …, D]` hidden states.
      chosen: `[B, …, k]` int32 experts.
      weights: `[B, …, k]` their weights.
      *kernels: Gate, up and down projections `[E, …]`.

    Returns:
      An array of the shape of `x`.
    """
    if self.mesh.size == 1:
      return moe.apply_experts(way, x, chosen, weights, *kernels)
    sizes = self.mesh.shape
    (expert_axis,) = LOGICAL_AXIS_RULES['experts']
    (tensor_axis,) = LOGICAL_AXIS_RULES['mlp']
    row_shards = math.prod(sizes[axis] for axis in LOGICAL_AXIS_RULES['batch'])
    split_rows = x.shape[0] % row_shards == 0
    gate, up, down = kernels
    kernel_specs = (
      _matrix_spec(gate, None, tensor_axis),
      _matrix_spec(up, None, tensor_axis),
      _matrix_spec(down, tensor_axis, None),
    )

    def compute_shard(
      x: jax.Array,
      chosen: jax.Array,
      weights: jax.Array,
      gate: Matrix,
      up: Matrix,
      down: Matrix,
    ) -> jax.Array:
      if split_rows:
        x, chosen, weights = (
          jax.lax.all_gather(y, expert_axis, axis=0, tiled=True)
          for y in (x, chosen, weights)
        )
      local_experts = chosen - jax.lax.axis_index(expert_axis) * gate.shape[0]
      y = moe.apply_experts(way, x, local_experts, weights, gate, up, down)
      if sizes[tensor_axis] > 1:
        y = jax.lax.psum(y, tensor_axis)
      if split_rows:
        return jax.lax.psum_scatter(y, expert_axis, scatter_dimension=0, tiled=True)
      return jax.lax.psum(y, expert_axis)

    token_spec = P(LOGICAL_AXIS_RULES['batch'] if split_rows else None)
    return jax.shard_map(
      compute_shard,
      mesh=self.mesh,
      in_specs=(token_spec, token_spec, token_spec, *kernel_specs),
      out_specs=token_spec,
      check_vma=False,
    )(x, chosen, weights, *kernels)


def _matrix_spec(matrix: Matrix, inputs: str | None, outputs: str | None) -> Any:
  """Returns the spec of a matrix per expert; inputs and outputs are its mesh axes."""
  (expert_axis,) = LOGICAL_AXIS_RULES['experts']
  if isinstance(matrix, Biased):
    inner = _matrix_spec(matrix.matrix, inputs, outputs)
    return Biased(inner, P(expert_axis, outputs))  # pyright: ignore
  if not isinstance(matrix, Adapted):
    return P(expert_axis, inputs, outputs)
  a, b = P(expert_axis, inputs, None), P(expert_axis, None, outputs)
  return Adapted(P(expert_axis, inputs, outputs), a, b)  # pyright: ignore
