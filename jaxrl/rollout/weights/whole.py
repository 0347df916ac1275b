"""Parameters as a checkpoint has them, one tensor at a time, whole on every device."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
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
  the host's memory is brought there a layer at a time. The order is a checkpoint's:
  layer after layer, so that whoever loads them can finish one before the next. dtype:
  floating-point arrays are cast to it; None keeps each one's own. No array is a view
  of `params`.
  """
  resting: dict[tuple[str, ...], list[np.ndarray]] = {}
  at, brought = ((), ()), None
  for tensor in names.tensors(shape):
    leaf, index = _leaf(params, tensor), tensor.index
    if leaf.sharding.memory_kind == 'pinned_host':
      if tensor.path not in resting:
        resting[tensor.path] = _held(leaf)
      if (tensor.path, index[:1]) != at:
        brought = None  # let go of before there is another
        brought = _brought(leaf, resting[tensor.path], index[:1])
        at = tensor.path, index[:1]
      assert brought is not None
      leaf, index = brought, (*(0 for _ in index[:1]), *index[1:])
    kind = dataclasses.replace(tensor, name='', index=(0,) * len(index))
    make = _make(kind, cast(leaf, dtype), _whole(leaf.sharding))
    yield tensor, make(leaf, index)


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


def _held(leaf: jax.Array) -> list[np.ndarray]:
  """What this process has of it, shard by shard; those that are alike are one array."""
  found: dict[str, np.ndarray] = {}
  for shard in leaf.addressable_shards:
    if str(shard.index) not in found:
      found[str(shard.index)] = np.asarray(shard.data)
  return [found[str(shard.index)] for shard in leaf.addressable_shards]


def _brought(
  leaf: jax.Array, shards: Sequence[np.ndarray], layers: tuple[int, ...]
) -> jax.Array:
  """One layer, of a leading axis of 1, or all of a parameter that rests in the host's
  memory, which programs cannot read. shards: what this process has of it.
  """
  layout = leaf.sharding.with_memory_kind('device')
  for layer in layers:
    shards = [shard[layer : layer + 1] for shard in shards]
  devices = [shard.device for shard in leaf.addressable_shards]
  shape = (1, *leaf.shape[1:]) if layers else leaf.shape
  pieces = jax.device_put(shards, devices)
  return jax.make_array_from_single_device_arrays(shape, layout, pieces)


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
