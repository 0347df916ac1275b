"""Snapshots of which only what changed since the one before leaves the devices."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.rollout.weights.layout import (
  Region,
  Shard,
  flatten,
  nest,
  on_host,
  pieces,
  region_of,
  snapshot,
)
from jaxrl.types import Params
from kernels import dispatch
from kernels.sparse_delta import Delta, extract, scatter

SHARE = 16  # where more than one element in so many changed, all are copied
LEAST, MOST = 4096, 2**31 - 1  # elements of a shard for which it pays, and can be done


@dataclasses.dataclass(frozen=True)
class _Piece:
  """A region now: `data`, before any cast; kept: what it was, there and on the host."""

  region: Region
  data: jax.Array
  kept: tuple[jax.Array, np.ndarray] | None
  delta: Delta | None


class Changes:
  """Takes snapshots as `layout.snapshot` does, to the bit, of what changes little.

  The version before stays on the devices, in `dtype`, and is compared there. Of a
  shard of which few elements changed, these and their places are copied to the host.
  """

  def __init__(self, dtype: str | None = None):
    self._dtype = dtype
    self._kept: dict[Region, tuple[jax.Array, np.ndarray]] = {}

  def snapshot(self, params: Params) -> list[Shard]:
    """As `layout.snapshot`; each shard tells what changed, where that was looked for.

    When this returns, `params` may be donated.
    """
    kept, self._kept = self._kept, {}  # a snapshot that fails leaves none behind
    found: list[Shard] = []
    for name, leaf in flatten(params).items():
      if isinstance(leaf, jax.Array):
        # A parameter at a time: of others there is nothing but the version before.
        begun = [self._begin(name, leaf, piece, kept) for piece in pieces(leaf)]
        while begun:
          found.append(self._end(begun.pop(0)))
      else:
        found += snapshot(nest({name: leaf}), self._dtype)
    return found

  def _begin(self, name: str, leaf: jax.Array, piece: Any, kept: Any) -> _Piece:
    data = piece.data
    shape = jax.eval_shape(functools.partial(_cast, dtype=self._dtype), data)
    region = region_of(name, leaf.shape, shape, piece.index)
    before = kept.pop(region, None)
    if before is None:
      return _Piece(region, data, None, None)
    delta = _compare(before[0], data, self._dtype, region.size // SHARE)
    return _Piece(region, data, before, delta)

  def _end(self, piece: _Piece) -> Shard:
    region, delta = piece.region, piece.delta
    if piece.kept is None or delta is None or delta.count > len(delta.indices):
      words = on_host(_copy(piece.data, self._dtype))
      if keeps(region.size, piece.data.dtype):
        # Its own copy: on a CPU the words may lie in the memory of the other.
        self._kept[region] = _copy(piece.data, self._dtype), words
      return Shard(region, words)
    device, old = piece.kept
    count = int(delta.count)
    size = min(1 << count.bit_length(), len(delta.indices))  # few programs, few bytes
    indices, values = jax.device_get(_first(delta, size))
    indices, words = indices[:count], old.copy()
    words[indices] = values[:count].view(words.dtype)
    self._kept[region] = _put(device, delta), words
    return Shard(region, words, since=old, changed=indices)


def keeps(size: int, dtype: Any) -> bool:
  """Whether of a shard of so many elements the version before stays on its device."""
  return jnp.issubdtype(dtype, jnp.floating) and LEAST <= size <= MOST


def _cast(x: jax.Array, dtype: str | None) -> jax.Array:
  real = jnp.issubdtype(x.dtype, jnp.floating)
  return x.astype(dtype) if real and dtype else x


@functools.partial(jax.jit, static_argnums=1)
def _copy(x: jax.Array, dtype: str | None) -> jax.Array:
  return jnp.array(_cast(x, dtype), copy=True)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _compare(old: jax.Array, new: jax.Array, dtype: str | None, capacity: int) -> Delta:
  dispatch.choose('sparse_delta', {'xla': extract}, platform=dispatch.platform_of(None))
  return extract(old, _cast(new, dtype), capacity=capacity)


@functools.partial(jax.jit, static_argnums=1)
def _first(delta: Delta, size: int) -> tuple[jax.Array, jax.Array]:
  return delta.indices[:size], delta.values[:size]


_put = jax.jit(scatter, donate_argnums=0)
