"""The mesh arranges the devices into named axes."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

MESH_AXES = ('data', 'fsdp', 'tensor', 'context', 'expert')


def make_mesh(
  *,
  data: int = -1,
  fsdp: int = 1,
  tensor: int = 1,
  context: int = 1,
  expert: int = 1,
  devices: Sequence[Any] | None = None,
) -> Mesh:
  """Arranges devices as data × fsdp × tensor × context × expert.

  One of the sizes may be −1: the devices that are left.

  Args:
    data: Replicas of the parameters, each with its share of the rows.
    fsdp: Shares of parameters and rows.
    tensor: Shares of heads, feed-forward width and vocabulary.
    context: Shares of every row's length.
    expert: Shares of experts and rows.
    devices: The devices; default, all of them.

  Returns:
    The mesh.

  Raises:
    ValueError: The product of the sizes is not the number of devices.
  """
  devices = list(jax.devices() if devices is None else devices)
  requested = data, fsdp, tensor, context, expert
  sizes: dict[str, int] = dict(zip(MESH_AXES, requested, strict=True))
  setting = ', '.join(f'{name}={size}' for name, size in sizes.items())
  invalid = [name for name, size in sizes.items() if size < 1 and size != -1]
  if invalid:
    raise ValueError(
      f'mesh {setting}: {invalid[0]} must be positive, or -1 for the rest'
    )
  open_axes = [name for name, size in sizes.items() if size == -1]
  if len(open_axes) > 1:
    raise ValueError(f'mesh {setting}: only one axis can be -1')
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
  return make_mesh(data=1, devices=jax.devices()[:1])


def _arrange(sizes: tuple[int, ...], devices: list[Any]) -> Mesh:
  types = (AxisType.Auto,) * len(MESH_AXES)
  try:
    return jax.make_mesh(sizes, MESH_AXES, axis_types=types, devices=devices)
  except NotImplementedError:
    # A size that is no product of a torus's axes, such as 8 of 4 × 4 × 4: one is split.
    device_array = mesh_utils.create_device_mesh(
      sizes, devices, allow_split_physical_axes=True
    )
    return Mesh(device_array, MESH_AXES, axis_types=types)


def _divisors(number: int) -> list[int]:
  return [size for size in range(1, number + 1) if number % size == 0]
