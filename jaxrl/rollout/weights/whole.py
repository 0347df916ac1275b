"""Parameters as a checkpoint has them, one tensor at a time, whole on every device."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxrl.models import names
from jaxrl.models.config import ModelConfig
from jaxrl.models.names import Tensor
from jaxrl.types import Params


def tensors(
  shape: ModelConfig, params: Params, dtype: str | None = None
) -> Iterator[tuple[Tensor, jax.Array]]:
  """Every tensor under its Hugging Face name, gathered only while it is looked at.

  params: may be sharded over the devices of several processes; all of these then
  iterate, in step, and each has the whole tensor on all of its devices. What lies in
  the host's memory is brought there a parameter, of all layers, at a time. dtype:
  floating-point arrays are cast to it; None keeps each one's own. No array is a view
  of `params`.
  """
  path, leaf = (), None
  for tensor in names.tensors(shape):
    if tensor.path != path:
      path, leaf = tensor.path, None  # let go of before there is another
      leaf = _on_device(_leaf(params, tensor))
    assert leaf is not None
    kind = dataclasses.replace(tensor, name='', index=(0,) * len(tensor.index))
    make = _make(kind, cast(leaf, dtype), _whole(leaf.sharding))
    yield tensor, make(leaf, tensor.index)


def size(shape: ModelConfig, params: Params, dtype: str | None = None) -> int:
  """Bytes of all of them."""
  return sum(
    math.prod(tensor.shape) * jnp.dtype(cast(_leaf(params, tensor), dtype)).itemsize
    for tensor in names.tensors(shape)
  )


def cast(leaf: jax.Array, dtype: str | None) -> str:
  """The dtype, by its name, in which an array is given."""
  real = jnp.issubdtype(leaf.dtype, jnp.floating)
  return dtype if dtype and real else leaf.dtype.name


def _leaf(params: Params, tensor: Tensor) -> jax.Array:
  leaf = params
  for key in tensor.path:
    leaf = leaf[key]
  return leaf  # pyright: ignore


def _on_device(leaf: jax.Array) -> jax.Array:
  """A parameter that rests in the host's memory, where programs can read it."""
  if leaf.sharding.memory_kind == 'pinned_host':
    return jax.device_put(leaf, leaf.sharding.with_memory_kind('device'))
  return leaf


def _whole(sharding: Sharding) -> Sharding:
  if isinstance(sharding, NamedSharding):
    return NamedSharding(sharding.mesh, PartitionSpec())
  return sharding


@functools.cache
def _make(
  kind: Tensor, dtype: str, sharding: Sharding
) -> Callable[[jax.Array, tuple[int, ...]], jax.Array]:
  """One program for all layers' and experts' tensors of a kind."""

  def make(leaf: jax.Array, index: tuple[int, ...]) -> jax.Array:
    return jnp.array(kind.to_hf(leaf[index]), dtype=dtype, copy=True)  # pyright: ignore

  return jax.jit(make, out_shardings=sharding)
