"""The lengths that kernels of attention take, and sequences padded to them."""

import jax
import jax.numpy as jnp

BLOCK = 128  # of multiples of it lengths are; shorter ones are not worth a kernel


def padded(length: int) -> int:
  """A length that blocks of some size divide; larger ones for longer sequences."""
  block = BLOCK if length <= 8 * BLOCK else 4 * BLOCK
  return -(-length // block) * block


def pad(arrays: tuple[jax.Array, ...], length: int) -> list[jax.Array]:
  """Zeros after the last position, axis 1."""

  def wide(x):
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), *((0, 0),) * (x.ndim - 2)))

  return [wide(x) for x in arrays]
