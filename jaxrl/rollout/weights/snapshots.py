"""Snapshots copy a learner's weights from its devices to the host, as shards.

`snapshot` copies everything. `FrozenBaseSnapshot` copies a frozen base model only once,
and `DeviceDeltaSnapshot` copies only the elements that changed since the version
before. All three return the same shards, to the bit.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models import lora
from jaxrl.rollout.weights.shards import (
  Region,
  Shard,
  as_uint_view,
  flatten,
  make_region,
  unflatten,
)
from jaxrl.rollout.weights.weight_store import cast_copy
from jaxrl.types import AnyArray, Params
from kernels import dispatch
from kernels.sparse_delta import Delta, extract, scatter

# Everything is copied if more than one element in this many changed.
ELEMENTS_PER_CHANGE = 16
# Comparing a shard on its device pays from this size on, and is possible up to this.
MIN_COMPARED_ELEMENTS = 4096
MAX_COMPARED_ELEMENTS = 2**31 - 1

NOTHING_CHANGED = np.zeros(0, np.int64)


def snapshot(params: Params, dtype: str | None = None) -> list[Shard]:
  """Copies the shards that this process holds to the host, each of them once.

  Nothing is gathered: a sharded array gives one `Shard` for each distinct piece of it
  that this process holds. When this returns, `params` may be donated.

  Args:
    params: Nested dicts of JAX or numpy arrays.
    dtype: Floating-point arrays are cast to it, on their devices; None keeps the dtype
      of each.

  Returns:
    The shards, in the order of the leaves.

  Raises:
    ValueError: An array has a dtype that is not one of `SAFETENSORS_DTYPES`.
  """
  leaves = flatten(params)
  on_device = {n: x for n, x in leaves.items() if isinstance(x, jax.Array)}
  pieces = {
    name: own_pieces(copy) for name, copy in cast_copy(on_device, dtype).items()
  }
  for copies in pieces.values():
    for piece in copies:
      piece.data.copy_to_host_async()
  shards = []
  for name, leaf in leaves.items():
    if name not in pieces:
      array = _cast_on_host(np.asarray(leaf), dtype)
      shards.append(Shard(make_region(name, array.shape, array), as_uint_view(array)))
    for piece in pieces.get(name, ()):
      region = make_region(name, leaf.shape, piece.data, piece.index)
      shards.append(Shard(region, to_host_bits(piece.data)))
  return shards


def own_pieces(array: jax.Array) -> list[AnyArray]:
  """Returns the addressable shards of `array` that this process has to send."""
  return [s for s in array.addressable_shards if s.replica_id == 0]


def to_host_bits(piece: jax.Array) -> np.ndarray:
  """Returns the bits of a single-device array that nobody else holds, `[size]`."""
  return as_uint_view(np.ascontiguousarray(piece).reshape(piece.shape))


def _cast_on_host(array: np.ndarray, dtype: str | None) -> np.ndarray:
  is_float = jnp.issubdtype(array.dtype, jnp.floating)
  return np.array(array, dtype=dtype if is_float else None, order='C')


class FrozenBaseSnapshot:
  """Takes snapshots of one learner's weights, and copies a frozen base only once.

  For weights whose adapters the engines merge (`models.unmerged`). The base is copied
  again if a checksum over its bits, which is taken on the devices each time, changes.
  The shards of a base that was not copied say that none of their elements changed.

  Args:
    dtype: Floating-point arrays are cast to it; None keeps the dtype of each.
  """

  def __init__(self, dtype: str | None = None):
    self._dtype = dtype
    self._base: dict[str, list[Shard]] = {}
    self._base_checksum: int | None = None

  def snapshot(self, params: Params) -> list[Shard]:
    """Copies `params` to the host, as the function `snapshot` does."""
    if not lora.is_transfer(params):
      return snapshot(params, self._dtype)
    frozen = {
      '.'.join(key.key for key in path)
      for path, _ in jax.tree_util.tree_leaves_with_path(params)
      if not lora.is_trainable(path)
    }
    leaves = flatten(params)
    checksum = int(_checksum({name: leaves[name] for name in sorted(frozen)}))
    reused = frozen if checksum == self._base_checksum else set()
    copied: dict[str, list[Shard]] = {}
    to_copy = unflatten({name: x for name, x in leaves.items() if name not in reused})
    for shard in snapshot(to_copy, self._dtype):
      copied.setdefault(shard.region.name, []).append(shard)
    shards_of = self._base | copied
    shards = [shard for name in leaves for shard in shards_of[name]]
    if not reused:
      self._base, self._base_checksum = {}, checksum
      for s in shards:
        if s.region.name in frozen:
          unchanged = Shard(s.region, s.bits, s.bits, NOTHING_CHANGED)
          self._base.setdefault(s.region.name, []).append(unchanged)
    return shards


@jax.jit
def _checksum(leaves: Params) -> jax.Array:
  return lora.fingerprint(leaves)


@dataclasses.dataclass(frozen=True)
class _ComparedPiece:
  """A piece that is being compared with the version before.

  Attributes:
    region: Where the piece belongs.
    data: The piece, before any cast.
    base: The version before, on the device and as bits on the host.
    delta: Where they differ.
  """

  region: Region
  data: jax.Array
  base: tuple[jax.Array, np.ndarray] | None
  delta: Delta | None


class DeviceDeltaSnapshot:
  """Takes snapshots of weights that change little, and copies only what changed.

  The version before stays on the devices, in `dtype`, and is compared there. If few
  elements of a shard changed, only these and their indices are copied to the host.

  Args:
    dtype: Floating-point arrays are cast to it; None keeps the dtype of each.
  """

  def __init__(self, dtype: str | None = None):
    self._dtype = dtype
    self._base: dict[Region, tuple[jax.Array, np.ndarray]] = {}

  def snapshot(self, params: Params) -> list[Shard]:
    """Copies `params` to the host, as the function `snapshot` does.

    Returns:
      The shards; those that were compared on a device have `changed_indices`.
    """
    base, self._base = self._base, {}  # a snapshot that fails leaves none behind
    shards: list[Shard] = []
    for name, leaf in flatten(params).items():
      if isinstance(leaf, jax.Array):
        # One parameter at a time, so that only one is on the devices twice.
        pieces = [self._compare(name, leaf, piece, base) for piece in own_pieces(leaf)]
        while pieces:
          shards.append(self._to_host(pieces.pop(0)))
      else:
        shards += snapshot(unflatten({name: leaf}), self._dtype)
    return shards

  def _compare(
    self,
    name: str,
    leaf: jax.Array,
    piece: AnyArray,
    base: dict[Region, tuple[jax.Array, np.ndarray]],
  ) -> _ComparedPiece:
    data = piece.data
    cast_shape = jax.eval_shape(functools.partial(_cast, dtype=self._dtype), data)
    region = make_region(name, leaf.shape, cast_shape, piece.index)
    own_base = base.pop(region, None)
    if own_base is None:
      return _ComparedPiece(region, data, None, None)
    capacity = region.size // ELEMENTS_PER_CHANGE
    delta = _find_changes(own_base[0], data, self._dtype, capacity)
    return _ComparedPiece(region, data, own_base, delta)

  def _to_host(self, piece: _ComparedPiece) -> Shard:
    region, delta = piece.region, piece.delta
    if piece.base is None or delta is None or delta.count > len(delta.indices):
      bits = to_host_bits(cast_copy(piece.data, self._dtype))
      if is_compared_on_device(region.size, piece.data.dtype):
        # A copy of its own: on a CPU the bits may lie in the memory of the other.
        self._base[region] = cast_copy(piece.data, self._dtype), bits
      return Shard(region, bits)
    device_base, host_base = piece.base
    count = int(delta.count)
    # A power of two, so that there are few programs and few bytes are copied.
    size = min(1 << count.bit_length(), len(delta.indices))
    indices, values = jax.device_get(_first(delta, size))
    indices, bits = indices[:count], host_base.copy()
    bits[indices] = values[:count].view(bits.dtype)
    self._base[region] = _apply_on_device(device_base, delta), bits
    return Shard(region, bits, base_bits=host_base, changed_indices=indices)


def is_compared_on_device(size: int, dtype: np.dtype) -> bool:
  """Returns whether `DeviceDeltaSnapshot` keeps a shard of `size` on its device."""
  is_float = jnp.issubdtype(dtype, jnp.floating)
  return is_float and MIN_COMPARED_ELEMENTS <= size <= MAX_COMPARED_ELEMENTS


def _cast(x: jax.Array, dtype: str | None) -> jax.Array:
  is_float = jnp.issubdtype(x.dtype, jnp.floating)
  return x.astype(dtype) if is_float and dtype else x


@functools.partial(jax.jit, static_argnums=(2, 3))
def _find_changes(
  old: jax.Array, new: jax.Array, dtype: str | None, capacity: int
) -> Delta:
  dispatch.choose('sparse_delta', {'xla': extract}, platform=dispatch.platform_of(None))
  return extract(old, _cast(new, dtype), capacity=capacity)


@functools.partial(jax.jit, static_argnums=1)
def _first(delta: Delta, size: int) -> tuple[jax.Array, jax.Array]:
  return delta.indices[:size], delta.values[:size]


_apply_on_device = jax.jit(scatter, donate_argnums=0)
