"""One table says where every axis of parameters and activations lives on the mesh."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jaxrl.signature import ConfigError
from jaxrl.types import Params
from kernels.fused_logprobs import Shards

# Logical axis → the mesh axes it is split over. The embedding's feature axis stays
# whole: splitting it over fsdp makes the compiler rebuild whole activations; its
# vocabulary axis is split instead. `rows` are the batch's rows, `batch` the model's,
# which cuts each into as many as the context axis has devices: lengths are whole there.
RULES: dict[str, tuple[str, ...]] = {
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


def rows_multiple(mesh: Mesh) -> int:
  """The number of shares that rows of a batch are split into."""
  return math.prod(mesh.shape[axis] for axis in RULES['rows'])


def rows(mesh: Mesh) -> NamedSharding:
  """The layout of arrays `[B, …]`: rows split, all else whole."""
  return NamedSharding(mesh, P(RULES['rows']))


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, P())


def put(x: Any, layout: Sharding, *, copy: bool = False) -> jax.Array:
  """`x` on the devices. copy: share no memory with it.

  Where the layout spans processes each of them has the same `x`, which is not checked:
  JAX's own check would send all of it around.
  """
  remote = isinstance(x, jax.Array) and not x.is_fully_addressable
  if layout.is_fully_addressable or remote:
    if copy and isinstance(x, jax.Array):
      # What a device holds already of an array for several, device_put leaves there,
      # whatever it is told of aliases.
      x = jnp.array(x, copy=True)
    return jax.device_put(x, layout, may_alias=False if copy else None)
  host = np.asarray(x)
  return jax.make_array_from_callback(
    host.shape, layout, lambda index: np.array(host[index])
  )


def params_sharding(mesh: Mesh | AbstractMesh, axes: Params, shapes: Params) -> Params:
  """The tree of layouts of parameters.

  axes: the tree of `shapes` with each array replaced by its axes' logical names.
  Raises ValueError, naming parameter and numbers, where the mesh does not divide.
  """

  def place(path, names, leaf) -> NamedSharding:
    where = jax.tree_util.keystr(path, simple=True, separator='.')
    sizes = zip(names, leaf.shape, strict=True)
    return NamedSharding(mesh, P(*(_split(mesh, n, s, where) for n, s in sizes)))

  return jax.tree_util.tree_map_with_path(
    place, axes, shapes, is_leaf=lambda x: isinstance(x, tuple)
  )


def _split(mesh: Mesh | AbstractMesh, name: str | None, size: int, where: str) -> Any:
  """The mesh axes for one array axis; later ones are left out if they do not divide."""
  axes = [axis for axis in RULES.get(name or '', ()) if mesh.shape[axis] > 1]
  while len(axes) > 1 and size % math.prod(mesh.shape[axis] for axis in axes):
    axes.pop()
  if not axes:
    return None
  shares = math.prod(mesh.shape[axis] for axis in axes)
  if size % shares:
    sizes = ', '.join(str(n) for n in range(1, size + 1) if size % n == 0)
    raise ConfigError(
      f'mesh axis {axes[0]}={shares} does not divide {name}={size} of parameter '
      f'{where}; choose a {axes[0]} size that does: {sizes}'
    )
  return tuple(axes) if len(axes) > 1 else axes[0]


@dataclasses.dataclass(frozen=True)
class Constrain:
  """Pins activations to the mesh: `(x, *logical names) -> x`. Hashable."""

  mesh: Mesh

  @property
  def shards(self) -> Shards:
    """How states and the table of the vocabulary are split where they meet."""
    return Shards(self.mesh, RULES['batch'], RULES['length'], RULES['heads'])

  def __call__(self, x: jax.Array, *names: str | None) -> jax.Array:
    if self.mesh.size == 1:
      return x
    spec = []
    for name, size in zip(names, x.shape, strict=True):
      axes = RULES.get(name or '', ())
      shares = math.prod(self.mesh.shape[axis] for axis in axes)
      spec.append(axes if axes and size % shares == 0 else None)
    return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*spec)))

  def shard(
    self,
    function: Callable[..., jax.Array],
    inputs: tuple[tuple[str | None, ...], ...],
    output: tuple[str | None, ...],
  ) -> Callable[..., jax.Array]:
    """`function` on every device's own part of its arrays, as kernels need it.

    inputs, output: logical names of the arrays' axes; None is whole. An axis of the
    mesh that does not divide all that it would split splits nothing, so that heads
    stay with their keys.
    """
    if self.mesh.size == 1:
      return function

    def run(*arrays: jax.Array) -> jax.Array:
      whole = set()
      for names, x in zip(inputs, arrays, strict=True):
        for name, size in zip(names, x.shape, strict=True):
          axes = RULES.get(name or '', ())
          if size % math.prod(self.mesh.shape[axis] for axis in axes):
            whole.add(axes)

      def spec(names):
        split = (RULES.get(name or '', ()) for name in names)
        return P(*(axes if axes and axes not in whole else None for axes in split))

      layouts = tuple(map(spec, inputs))
      options = {'in_specs': layouts, 'out_specs': spec(output), 'check_vma': False}
      return jax.shard_map(function, mesh=self.mesh, **options)(*arrays)

    return run
