"""The mesh: how the devices are arranged into named axes."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

AXES = ('data', 'fsdp', 'tensor', 'context', 'expert')


def make_mesh(
  *,
  data: int = -1,
  fsdp: int = 1,
  tensor: int = 1,
  context: int = 1,
  expert: int = 1,
  devices: Sequence[Any] | None = None,
) -> Mesh:
  """Arranges `devices` (default: all) as data × fsdp × tensor × context × expert.

  data: replicas of the parameters, each with its share of the rows. fsdp: shares of
  parameters and rows. tensor: shares of heads, feed-forward width and vocabulary.
  context: shares of every row's length. expert: shares of experts and rows.
  One of them may be −1: the devices that are left. Raises ValueError with the
  numbers when the axes do not use the devices up.
  """
  devices = list(jax.devices() if devices is None else devices)
  wanted = data, fsdp, tensor, context, expert
  sizes: dict[str, int] = dict(zip(AXES, wanted, strict=True))
  asked = ', '.join(f'{name}={size}' for name, size in sizes.items())
  wrong = [name for name, size in sizes.items() if size < 1 and size != -1]
  if wrong:
    raise ValueError(f'mesh {asked}: {wrong[0]} must be positive, or -1 for the rest')
  open_axes = [name for name, size in sizes.items() if size == -1]
  if len(open_axes) > 1:
    raise ValueError(f'mesh {asked}: only one axis can be -1')
  fixed = math.prod(size for size in sizes.values() if size != -1)
  if open_axes and len(devices) % fixed == 0:
    sizes[open_axes[0]] = len(devices) // fixed
  if math.prod(sizes.values()) != len(devices):
    what = 'does not divide' if open_axes else 'is not'
    divisors = ', '.join(map(str, _divisors(len(devices))))
    advice = f'one of {divisors} does' if open_axes else 'set one axis to -1'
    raise ValueError(
      f'mesh {asked}: the product of the sizes, {fixed}, {what} the number of '
      f'devices, {len(devices)}; {advice}'
    )
  return _arranged(tuple(sizes.values()), devices)


def _arranged(sizes: tuple[int, ...], devices: list[Any]) -> Mesh:
  types = (AxisType.Auto,) * len(AXES)
  try:
    return jax.make_mesh(sizes, AXES, axis_types=types, devices=devices)
  except NotImplementedError:
    # An axis that is no product of a torus's own ones, as 8 of 4 × 4 × 4: one is cut.
    whole = mesh_utils.create_device_mesh(
      sizes, devices, allow_split_physical_axes=True
    )
    return Mesh(whole, AXES, axis_types=types)


def _divisors(number: int) -> list[int]:
  return [size for size in range(1, number + 1) if number % size == 0]


def single_device_mesh() -> Mesh:
  """The first device alone."""
  return make_mesh(data=1, devices=jax.devices()[:1])
