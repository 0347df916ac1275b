"""The mesh arranges the devices into named axes."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jaxrl.options import OptionError, Options, option

MESH_AXES = ('data', 'fsdp', 'tensor', 'context', 'expert')


@dataclasses.dataclass(frozen=True)
class MeshOptions(Options):
  """Sizes of the mesh: how devices are shared out over its axes."""

  data: int = option(
    -1,
    'Replicas of the parameters, which share the rows; -1 takes the rest.',
  )
  fsdp: int = option(1, 'Shares of parameters and rows; -1 takes the rest.')
  tensor: int = option(1, 'Shares of heads, feed-forward width and vocabulary.')
  context: int = option(1, "Shares of every row's length.")
  expert: int = option(1, 'Shares of experts and rows.')

  def __post_init__(self) -> None:
    super().__post_init__()
    for axis, size in self.as_dict().items():
      if size < 1 and size != -1:
        problem = 'must be at least 1, or -1 for all devices that are left'
        raise OptionError(axis, size, problem)
    rest = [axis for axis, size in self.as_dict().items() if size == -1]
    if len(rest) > 1 and rest[0] == 'data':  # as it is unless somebody sets it
      object.__setattr__(self, 'data', 1)
      del rest[0]
    if len(rest) > 1:
      problem = f'only one axis can be -1, and {rest[0]} is already'
      raise OptionError(rest[1], -1, problem)


def make_mesh(
  options: MeshOptions = MeshOptions(), *, devices: Sequence[Any] | None = None
) -> Mesh:
  """Arranges devices as data × fsdp × tensor × context × expert.

  Args:
    options: The sizes of the axes.
    devices: The devices; default, all of them.

  Returns:
    The mesh.

  Raises:
    ValueError: The product of the sizes is not the number of devices.
  """
  devices = list(jax.devices() if devices is None else devices)
  sizes: dict[str, int] = options.as_dict()
  setting = ', '.join(f'{name}={size}' for name, size in sizes.items())
  open_axes = [name for name, size in sizes.items() if size == -1]
  product = math.prod(size for size in sizes.values() if size != -1)
  if open_axes and len(devices) % product == 0:
    sizes[open_axes[0]] = len(devices) // product
  if math.prod(sizes.values()) != len(devices):
    problem = 'does not divide' if open_axes else 'is not'
    divisors = ', '.join(map(str, _divisors(len(devices))))
    advice = f'one of {divisors} does' if open_axes else 'set one axis to -1'
    raise ValueError(
      f'mesh {setting}: the product of the sizes, {product}, {problem} the number of '
      f'devices, {len(devices)}; {advice}'
    )
  return _arrange(tuple(sizes.values()), devices)


def single_device_mesh() -> Mesh:
  """Returns a mesh of the first device alone."""
  return make_mesh(MeshOptions(data=1), devices=jax.devices()[:1])


def _arrange(sizes: tuple[int, ...], devices: list[Any]) -> Mesh:
  types = (AxisType.Auto,) * len(MESH_AXES)
  try:
    return jax.make_mesh(sizes, MESH_AXES, axis_types=types, devices=devices)
  except NotImplementedError:
    # A size that is not a product of a torus's axes, as 8 of 4 × 4 × 4: one is split.
    device_array = mesh_utils.create_device_mesh(
      sizes, devices, allow_split_physical_axes=True
    )
    return Mesh(device_array, MESH_AXES, axis_types=types)


def _divisors(number: int) -> list[int]:
  return [size for size in range(1, number + 1) if number % size == 0]
