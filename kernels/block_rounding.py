"""Block rounding keeps a matrix in 8 bits, with a scale for each block of inputs.

The inputs of every output are divided into blocks. An element is a code of 8 bits times
the scale of its block, whose largest element has the largest code. Scales are bfloat16:
the product with a code is then exact in float32, and rounding what was rounded before
changes nothing.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

LARGEST = {'int8': 127.0, 'float8_e4m3fn': 448.0}  # codes; the smallest is minus that
LEAST_SCALE = 2.0**-100  # blocks with a smaller one are all zeros


@dataclasses.dataclass(frozen=True)
class BlockFormat:
  """How a matrix is rounded. Hashable and static.

  Attributes:
    dtype: The type of codes.
    block: Inputs that share a scale, at most. The blocks of a matrix have the same
      size, except for the last.
  """

  dtype: Literal['int8', 'float8_e4m3fn'] = 'int8'
  block: int = 128

  def __post_init__(self) -> None:
    if self.dtype not in LARGEST:
      raise ValueError(f'dtype={self.dtype!r} must be one of {", ".join(LARGEST)}')
    if self.block < 1:
      raise ValueError(f'block={self.block} must be at least 1')


def encode(matrix: jax.Array, form: BlockFormat) -> tuple[jax.Array, jax.Array]:
  """Rounds a matrix to codes and scales.

  Args:
    matrix: `[…, inputs, outputs]`, float.
    form: The format.

  Returns:
    Codes `[…, inputs, outputs]` in `form.dtype` and scales `[…, blocks, outputs]`
    bfloat16.
  """
  largest = LARGEST[form.dtype]
  num_blocks = -(-matrix.shape[-2] // form.block)
  blocks = _blocks(matrix.astype(jnp.float32), num_blocks)
  # Times a reciprocal, to which some compilers would turn a division, and some not.
  scales = jnp.abs(blocks).max(-2) * np.float32(1 / largest)
  scales = scales.astype(jnp.bfloat16)
  scales = jnp.where(scales < LEAST_SCALE, jnp.ones((), scales.dtype), scales)
  ratios = blocks / scales[..., None, :].astype(jnp.float32)
  codes = jnp.clip(ratios, -largest, largest)
  codes = jnp.round(codes) if form.dtype == 'int8' else codes
  return _rows(codes, matrix.shape[-2]).astype(form.dtype), scales


def decode(codes: jax.Array, scales: jax.Array) -> jax.Array:
  """Computes the matrix that codes and scales stand for.

  Args:
    codes: `[…, inputs, outputs]`.
    scales: `[…, blocks, outputs]`.

  Returns:
    `[…, inputs, outputs]` float32.
  """
  blocks = _blocks(codes.astype(jnp.float32), scales.shape[-2])
  blocks = blocks * scales[..., None, :].astype(jnp.float32)
  return _rows(blocks, codes.shape[-2])


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def rounded(matrix: jax.Array, form: BlockFormat) -> jax.Array:
  """Rounds a matrix; gradients pass as if it were not (arXiv 1308.3432).

  Args:
    matrix: `[…, inputs, outputs]`.
    form: The format.

  Returns:
    `decode(*encode(matrix))` in the type of `matrix`.
  """
  return decode(*encode(matrix, form)).astype(matrix.dtype)


@rounded.defjvp
def _rounded_jvp(form: BlockFormat, primals: tuple, tangents: tuple):
  return rounded(primals[0], form), tangents[0]


def _blocks(matrix: jax.Array, num_blocks: int) -> jax.Array:
  """Cuts `[…, inputs, outputs]` into `[…, blocks, size, outputs]`, padded by zeros."""
  *lead, inputs, outputs = matrix.shape
  size = -(-inputs // num_blocks)
  if padding := num_blocks * size - inputs:
    matrix = jnp.pad(matrix, (*((0, 0),) * len(lead), (0, padding), (0, 0)))
  return matrix.reshape(*lead, num_blocks, size, outputs)


def _rows(blocks: jax.Array, inputs: int) -> jax.Array:
  """Undoes `_blocks`."""
  *lead, _, _, outputs = blocks.shape
  return blocks.reshape(*lead, -1, outputs)[..., :inputs, :]
