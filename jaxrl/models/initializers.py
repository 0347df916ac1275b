"""Initializers make the parameters of layers, as Flax NNX variables."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.models.model_config import Lora

INIT_STD = 0.02


def normal_param(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple) -> nnx.Param:
  """Makes a small random array.

  Args:
    rngs: Random streams.
    shape: Its shape.
    axes: The logical names of its axes.
  """
  value = INIT_STD * jax.random.normal(rngs.params(), shape, jnp.float32)
  return nnx.Param(value, axes=axes)


def adapter_params(
  lora: Lora,
  shapes: tuple[tuple[int, ...], tuple[int, ...]],
  axes: tuple[tuple, tuple],
  rngs: nnx.Rngs,
  each: tuple[tuple[int, ...], tuple] = ((), ()),
) -> tuple[nnx.Param, nnx.Param]:
  """Makes A, random, and B, zero, beside a kernel `[*each, *inputs, *outputs]`.

  Args:
    lora: Which adapters.
    shapes: Of the inputs and of the outputs.
    axes: Names of the axes of the inputs and of the outputs.
    rngs: Random streams.
    each: The shape and the names of the axes along which there are kernels of their
      own.

  Returns:
    A `[*each, *inputs, rank]` and B `[*each, rank, *outputs]`.
  """
  (inputs, outputs), (lead, names) = shapes, each
  bound = 1 / math.sqrt(math.prod(inputs))
  whole = (*lead, *inputs, lora.rank)
  start = jax.random.uniform(rngs.params(), whole, minval=-bound, maxval=bound)
  a = nnx.Param(start, axes=(*names, *axes[0], None))
  b = nnx.Param(jnp.zeros((*lead, lora.rank, *outputs)), axes=(*names, None, *axes[1]))
  return a, b
