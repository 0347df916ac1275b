"""Model sharding binds a model to a mesh, so that its programs run on all devices."""

import dataclasses
from collections.abc import Callable

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxrl.models.model_config import ModelConfig
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.options import ConfigError, Keywords
from jaxrl.training.parallelism.sharding import LOGICAL_AXIS_RULES, ShardingConstraint
from jaxrl.types import Params, PyTree


@dataclasses.dataclass(frozen=True)
class PerDevice:
  """Runs a function on each device, with whole parameters and its share of rows.

  The program is the same on all devices; devices that share rows compute the same.
  Hashable.

  Attributes:
    mesh: The devices.
  """

  mesh: Mesh

  def __call__(
    self, function: Callable[..., PyTree], params: Params, *arrays: jax.Array
  ) -> PyTree:
    """Returns `function(params, *arrays)`.

    Args:
      function: Maps parameters and arrays to arrays, row by row.
      params: The parameters.
      *arrays: Arrays `[B, …]`.
    """
    if self.mesh.size == 1:
      return function(params, *arrays)
    rows = P(LOGICAL_AXIS_RULES['rows'])
    return jax.shard_map(
      function,
      mesh=self.mesh,
      in_specs=(P(), *(rows for _ in arrays)),
      out_specs=rows,
      check_vma=False,
    )(params, *arrays)


def on_mesh(model: TransformerLM, mesh: Mesh) -> TransformerLM:
  """Returns the model with its activations pinned to a mesh.

  Args:
    model: The model.
    mesh: The devices that it will run on.
  """
  changes: Keywords = {'constrain': ShardingConstraint(mesh)}
  if hasattr(model, 'platform'):
    changes['platform'] = mesh.devices.flat[0].platform
  if getattr(model, 'kept_bytes', 0) is None and changes['platform'] == 'gpu':
    # Imported here because only GPUs keep anything.
    from jaxrl.training.parallelism.device_memory import read_kept_bytes

    changes['kept_bytes'] = read_kept_bytes(mesh)
  if mesh.shape['context'] > 1:
    # Imported here because only meshes with a context axis need it.
    from jaxrl.training.parallelism.context_parallel import ContextParallel

    changes['context'] = ContextParallel(mesh)
  if hasattr(model, 'expert_fn') and model.config.num_experts:
    # Imported here because only models with experts need it.
    from jaxrl.training.parallelism.expert_parallel import ExpertParallel

    changes['expert_fn'] = ExpertParallel(mesh)
  exact = getattr(model, 'exact', None)
  if exact is not None:
    changes['exact'] = dataclasses.replace(exact, per_device=PerDevice(mesh))
  return dataclasses.replace(model, **changes)


def check_experts_mesh(config: ModelConfig, mesh: Mesh) -> None:
  """Raises ConfigError if a mesh shards the experts of a model that has none."""
  (axis,) = LOGICAL_AXIS_RULES['experts']
  if mesh.shape[axis] > 1 and not config.num_experts:
    raise ConfigError(
      f'mesh: {axis}={mesh.shape[axis]} splits experts, but this '
      f'model, of family {config.family}, has none: use data, fsdp or tensor'
    )
