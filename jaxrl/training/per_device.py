"""A function on each device of a mesh, with whole parameters and its own rows."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxrl.models.model import Model
from jaxrl.training.context import Context
from jaxrl.training.expert_parallel import ExpertParallel
from jaxrl.training.sharding import RULES, Constrain


@dataclasses.dataclass(frozen=True)
class PerDevice:
  """`(function, params, *arrays)` → function(params, *arrays), arrays `[B, …]`.

  Every device computes its share of the rows, by a program that is the same for all;
  devices that share rows compute the same. Hashable.
  """

  mesh: Mesh

  def __call__(
    self, function: Callable[..., Any], params: Any, *arrays: jax.Array
  ) -> Any:
    if self.mesh.size == 1:
      return function(params, *arrays)
    rows = P(RULES['rows'])
    return jax.shard_map(
      function,
      mesh=self.mesh,
      in_specs=(P(), *(rows for _ in arrays)),
      out_specs=rows,
      check_vma=False,
    )(params, *arrays)


def on_mesh(model: Model, mesh: Mesh) -> Model:
  """The model with its activations pinned to `mesh`, for the devices of that."""
  changes: dict[str, Any] = {'constrain': Constrain(mesh)}
  if hasattr(model, 'platform'):
    changes['platform'] = mesh.devices.flat[0].platform
  if mesh.shape['context'] > 1:
    changes['context'] = Context(mesh)
  if hasattr(model, 'mix'):
    changes['mix'] = ExpertParallel(mesh)
  exact = getattr(model, 'exact', None)
  if exact is not None:
    changes['exact'] = dataclasses.replace(exact, per_device=PerDevice(mesh))
  return dataclasses.replace(model, **changes)
