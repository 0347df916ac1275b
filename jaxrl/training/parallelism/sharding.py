"""Sharding maps every axis of parameters and activations to axes of the mesh.

One table, `LOGICAL_AXIS_RULES`, says how: models name the axes of their arrays, and the
functions here turn these names into shardings and constraints.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath

from jaxrl.options import ConfigError
from jaxrl.types import AnyArray, Params, PyTree

if TYPE_CHECKING:
  from kernels.fused_logprobs import LogprobShards

# Logical axis → the mesh axes it is split over. The embedding's feature axis stays
# whole: splitting it over fsdp makes the compiler rebuild whole activations; its
# vocabulary axis is split instead. `rows` are the batch's rows, `batch` the model's,
# which splits each into as many as the context axis has devices: lengths are whole
# there.
LOGICAL_AXIS_RULES: dict[str, tuple[str, ...]] = {
  'rows': ('data', 'fsdp', 'expert'),
  'batch': ('context', 'data', 'fsdp', 'expert'),
  'length': (),
  'layers': (),
  'embed': ('fsdp',),
  'embedding': (),
  'vocab': ('tensor', 'fsdp'),
  'heads': ('tensor',),
  'kv_heads': ('tensor',),
  'mlp': ('tensor',),
  'experts': ('expert',),
}


def num_row_shards(mesh: Mesh) -> int:
  """Returns the number of shards that the rows of a batch are split into."""
  return math.prod(mesh.shape[axis] for axis in LOGICAL_AXIS_RULES['rows'])


def rows_sharding(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of arrays `[B, …]` with their rows split."""
  return NamedSharding(mesh, P(LOGICAL_AXIS_RULES['rows']))


def replicated(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of arrays that every device has whole."""
  return NamedSharding(mesh, P())


def put_array(x: AnyArray, layout: Sharding, *, copy: bool = False) -> jax.Array:
  """Copies an array to the devices.

  If the sharding spans processes, each of them must have the same `x`. This is not
  checked: JAX's own check would send all of it around.

  Args:
    x: A numpy or JAX array.
    layout: The sharding.
    copy: Share no memory with `x`.

  Returns:
    The array on the devices.
  """
  is_remote = isinstance(x, jax.Array) and not x.is_fully_addressable
  if layout.is_fully_addressable or is_remote:
    if copy and isinstance(x, jax.Array):
      # If the new sharding spans several devices, device_put keeps the part that a
      # device already has, even with may_alias=False.
      x = jnp.array(x, copy=True)
    return jax.device_put(x, layout, may_alias=False if copy else None)
  host = np.asarray(x)
  return jax.make_array_from_callback(
    host.shape, layout, lambda index: np.array(host[index])
  )


def params_sharding(mesh: Mesh | AbstractMesh, axes: Params, shapes: Params) -> Params:
  """Returns the shardings of parameters.

  Args:
    mesh: The devices.
    axes: The tree of `shapes` with each array replaced by its axes' logical names.
    shapes: Shapes of the parameters.

  Raises:
    ConfigError: The mesh does not divide an axis.
  """

  def shard(
    path: KeyPath, names: tuple[str | None, ...], leaf: AnyArray
  ) -> NamedSharding:
    param_name = jax.tree_util.keystr(path, simple=True, separator='.')
    return NamedSharding(
      mesh,
      P(
        *(
          _mesh_axes(mesh, name, size, param_name)
          for name, size in zip(names, leaf.shape, strict=True)
        )
      ),
    )

  return jax.tree_util.tree_map_with_path(
    shard, axes, shapes, is_leaf=lambda x: isinstance(x, tuple)
  )


def _mesh_axes(
  mesh: Mesh | AbstractMesh, name: str | None, size: int, param_name: str
) -> PyTree:
  """Returns the mesh axes for an array axis; drops later ones that do not divide it."""
  axes = [
    axis for axis in LOGICAL_AXIS_RULES.get(name or '', ()) if mesh.shape[axis] > 1
  ]
  while len(axes) > 1 and size % math.prod(mesh.shape[axis] for axis in axes):
    axes.pop()
  if not axes:
    return None
  num_shards = math.prod(mesh.shape[axis] for axis in axes)
  if size % num_shards:
    divisors = ', '.join(str(n) for n in range(1, size + 1) if size % n == 0)
    raise ConfigError(
      f'mesh axis {axes[0]}={num_shards} does not divide {name}={size} of parameter '
      f'{param_name}; choose a {axes[0]} size that does: {divisors}'
    )
  return tuple(axes) if len(axes) > 1 else axes[0]


@dataclasses.dataclass(frozen=True)
class ShardingConstraint:
  """Pins activations to the mesh by the logical names of their axes; hashable.

  Attributes:
    mesh: The devices.
  """

  mesh: Mesh

  @property
  def shards(self) -> 'LogprobShards | None':
    """Returns how hidden states and the table are sharded; None on one device."""
    if self.mesh.size == 1:
      return None
    from kernels.fused_logprobs import LogprobShards

    return LogprobShards(
      self.mesh,
      LOGICAL_AXIS_RULES['batch'],
      LOGICAL_AXIS_RULES['length'],
      LOGICAL_AXIS_RULES['heads'],
    )

  def __call__(self, x: jax.Array, *names: str | None) -> jax.Array:
    """Returns `x` with a sharding constraint.

    Args:
      x: An activation.
      *names: The logical names of its axes; an axis that the mesh does not divide is
        not split, nor is one named None.
    """
    if self.mesh.size == 1:
      return x
    spec = []
    for name, size in zip(names, x.shape, strict=True):
      axes = LOGICAL_AXIS_RULES.get(name or '', ())
      num_shards = math.prod(self.mesh.shape[axis] for axis in axes)
      spec.append(axes if axes and size % num_shards == 0 else None)
    return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*spec)))

  def shard(
    self,
    function: Callable[..., jax.Array],
    inputs: tuple[tuple[str | None, ...], ...],
    output: tuple[str | None, ...],
  ) -> Callable[..., jax.Array]:
    """Returns `function` run on every device's own part of its arrays.

    Kernels need this. Mesh axes that do not divide everything they would split are not
    used at all, so that heads stay with their keys.

    Args:
      function: Maps arrays to an array.
      inputs: The logical names of each input's axes; None is not split.
      output: The logical names of the output's axes.
    """
    if self.mesh.size == 1:
      return function

    def run(*arrays: jax.Array) -> jax.Array:
      unused = set()
      for names, x in zip(inputs, arrays, strict=True):
        for name, size in zip(names, x.shape, strict=True):
          axes = LOGICAL_AXIS_RULES.get(name or '', ())
          if size % math.prod(self.mesh.shape[axis] for axis in axes):
            unused.add(axes)

      def spec(names: tuple[str | None, ...]) -> P:
        all_axes = (LOGICAL_AXIS_RULES.get(name or '', ()) for name in names)
        return P(*(axes if axes and axes not in unused else None for axes in all_axes))

      return jax.shard_map(
        function,
        mesh=self.mesh,
        in_specs=tuple(map(spec, inputs)),
        out_specs=spec(output),
        check_vma=False,
      )(*arrays)

    return run
