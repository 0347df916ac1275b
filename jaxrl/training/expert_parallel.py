"""Experts split over a mesh: every device computes its own, for its row of devices.

The tokens of the devices along the `expert` axis are gathered, each device computes
what its experts add to all of them, and the sums go back to where the tokens came from
(one all-gather and one reduce-scatter a layer). However a router chooses, no token is
dropped and no device waits for a buffer larger than the tokens at hand times k.
"""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxrl.models import moe
from jaxrl.models.config import ModelConfig
from jaxrl.signature import ConfigError
from jaxrl.training.sharding import RULES
from kernels.experts import Adapted, Matrix


def check(config: ModelConfig, mesh: Mesh) -> None:
  """Raises ConfigError for a mesh that would share out experts of a dense model."""
  (axis,) = RULES['experts']
  if mesh.shape[axis] > 1 and not config.num_experts:
    raise ConfigError(
      f'--config.mesh: {axis}={mesh.shape[axis]} shares out experts, and this model, '
      f'of family {config.family}, has none: give its devices to data, fsdp or tensor'
    )


@dataclasses.dataclass(frozen=True)
class ExpertParallel:
  """`moe.local` on a mesh; hashable. Rows that the mesh does not divide are computed
  on every device.
  """

  mesh: Mesh

  def __call__(
    self,
    way: moe.Mix,
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    *kernels: Matrix,
  ) -> jax.Array:
    """x `[B, …, D]`, chosen and weights `[B, …, k]`, kernels `[E, …]`, all global."""
    if self.mesh.size == 1:
      return moe.local(way, x, chosen, weights, *kernels)
    sizes = self.mesh.shape
    (experts,), (tensor,) = RULES['experts'], RULES['mlp']
    split = x.shape[0] % math.prod(sizes[axis] for axis in RULES['batch']) == 0
    gate, up, down = kernels
    specs = (
      _split(gate, None, tensor),
      _split(up, None, tensor),
      _split(down, tensor, None),
    )

    def here(x, chosen, weights, gate, up, down):
      if split:
        x, chosen, weights = (
          jax.lax.all_gather(y, experts, axis=0, tiled=True)
          for y in (x, chosen, weights)
        )
      own = chosen - jax.lax.axis_index(experts) * gate.shape[0]
      y = moe.local(way, x, own, weights, gate, up, down)
      if sizes[tensor] > 1:
        y = jax.lax.psum(y, tensor)
      if split:
        return jax.lax.psum_scatter(y, experts, scatter_dimension=0, tiled=True)
      return jax.lax.psum(y, experts)

    tokens = P(RULES['batch'] if split else None)
    return jax.shard_map(
      here,
      mesh=self.mesh,
      in_specs=(tokens, tokens, tokens, *specs),
      out_specs=tokens,
      check_vma=False,
    )(x, chosen, weights, *kernels)


def _split(matrix: Matrix, inputs: str | None, outputs: str | None) -> Any:
  """How a matrix an expert lies, whose inputs and outputs lie along those axes."""
  (experts,) = RULES['experts']
  if not isinstance(matrix, Adapted):
    return P(experts, inputs, outputs)
  a, b = P(experts, inputs, None), P(experts, None, outputs)
  return Adapted(P(experts, inputs, outputs), a, b)  # pyright: ignore
