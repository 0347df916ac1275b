"""Which piece of which parameter lies where: shards, and the chunks cut from them."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (numpy learns its dtypes by name from this)
import numpy as np

from jaxrl.types import Params

Window = tuple[slice, ...]
DTYPES = {  # what weights may be, and its name in safetensors
  'float64': 'F64',
  'float32': 'F32',
  'float16': 'F16',
  'bfloat16': 'BF16',
  'float8_e4m3fn': 'F8_E4M3',
  'float8_e5m2': 'F8_E5M2',
  'int64': 'I64',
  'int32': 'I32',
  'int16': 'I16',
  'int8': 'I8',
  'uint64': 'U64',
  'uint32': 'U32',
  'uint16': 'U16',
  'uint8': 'U8',
  'bool': 'BOOL',
}


@dataclasses.dataclass(frozen=True)
class Region:
  """A box of a parameter. name: its dotted path; dtype: numpy's name for it; shape:
  of the whole parameter; offset, extent: where the box starts, and its own shape.
  """

  name: str
  dtype: str
  shape: tuple[int, ...]
  offset: tuple[int, ...]
  extent: tuple[int, ...]

  @property
  def size(self) -> int:
    """Elements."""
    return math.prod(self.extent)

  @property
  def itemsize(self) -> int:
    return np.dtype(self.dtype).itemsize

  @property
  def window(self) -> Window:
    """The box as an index into the whole parameter."""
    return tuple(slice(o, o + e) for o, e in zip(self.offset, self.extent, strict=True))

  def cut(self, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, count) of runs of at most `chunk_bytes`, in the box's flat C order."""
    step = max(1, chunk_bytes // self.itemsize)
    for start in range(0, self.size, step):
      yield start, min(step, self.size - start)


@dataclasses.dataclass(frozen=True)
class Shard:
  """A region and its contents: `words`, flat unsigned integers of the same bits.

  since, changed: the words of the version before, the very array, and the ascending
  indices where these differ; None where nobody has looked.
  """

  region: Region
  words: np.ndarray
  since: np.ndarray | None = None
  changed: np.ndarray | None = None


def words(array: np.ndarray) -> np.ndarray:
  """Flat view of the bits of a C-contiguous array, as unsigned integers `[size]`."""
  return array.reshape(-1).view(f'u{array.dtype.itemsize}')


def flatten(params: Params) -> dict[str, Any]:
  """Leaves of nested dicts by dotted name. Raises ValueError for other trees."""
  found: dict[str, Any] = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    keys = [getattr(key, 'key', None) for key in path]
    if not all(isinstance(key, str) and key and '.' not in key for key in keys):
      where = jax.tree_util.keystr(path)
      raise ValueError(f'{where}: weights are nested dicts with plain names as keys')
    found['.'.join(keys)] = leaf  # pyright: ignore
  return found


def nest(named: Mapping[str, Any]) -> Params:
  """The nested dicts of dotted names: `flatten` undone."""
  tree: dict[str, Any] = {}
  for name, leaf in named.items():
    *folders, last = name.split('.')
    place = tree
    for folder in folders:
      place = place.setdefault(folder, {})
    place[last] = leaf
  return tree


def snapshot(params: Params, dtype: str | None = None) -> list[Shard]:
  """Copies the shards that this process holds to the host, each of them once.

  dtype: floating-point arrays are cast to it, on their devices; None keeps each
  one's own. Nothing is gathered: a sharded array gives one `Shard` for each distinct
  piece of it that lies here. When this returns, `params` may be donated. Raises
  ValueError for arrays of other dtypes than `DTYPES`.
  """
  leaves = flatten(params)
  on_device = {n: x for n, x in leaves.items() if isinstance(x, jax.Array)}
  copies = _copy(on_device, dtype)
  found = {name: pieces(copy) for name, copy in copies.items()}
  for them in found.values():
    for shard in them:
      shard.data.copy_to_host_async()
  shards = []
  for name, leaf in leaves.items():
    if name not in copies:
      array = _cast(np.asarray(leaf), dtype)
      shards.append(Shard(region_of(name, array.shape, array), words(array)))
    for piece in found.get(name, ()):
      region = region_of(name, leaf.shape, piece.data, piece.index)
      shards.append(Shard(region, on_host(piece.data)))
  return shards


def pieces(array: jax.Array) -> list[Any]:
  """The shards of `array` that are this process's to send."""
  return [s for s in array.addressable_shards if s.replica_id == 0]


def on_host(piece: jax.Array) -> np.ndarray:
  """The words of a piece that nothing else holds, once it has come to the host."""
  return words(np.ascontiguousarray(piece).reshape(piece.shape))


@functools.partial(jax.jit, static_argnums=1)
def _copy(arrays: dict[str, jax.Array], dtype: str | None) -> dict[str, jax.Array]:
  def one(x: jax.Array) -> jax.Array:
    real = jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.array(x, dtype=dtype if real else None, copy=True)

  return jax.tree.map(one, arrays)


def _cast(array: np.ndarray, dtype: str | None) -> np.ndarray:
  real = jnp.issubdtype(array.dtype, jnp.floating)
  return np.array(array, dtype=dtype if real else None, order='C')


def region_of(
  name: str, shape: Sequence[int], piece: Any, index: Window | None = None
) -> Region:
  """Of `piece`, at `index` of a parameter of this shape; None: all of it.

  Raises ValueError for arrays of other dtypes than `DTYPES`.
  """
  if piece.dtype.name not in DTYPES:
    raise ValueError(f'{name}: weights of dtype {piece.dtype} cannot be sent')
  index = index or (slice(0, None),) * len(piece.shape)
  offset = tuple(s.start or 0 for s in index)
  return Region(name, piece.dtype.name, tuple(shape), offset, tuple(piece.shape))


def overlap(region: Region, window: Window | None) -> tuple[Window, Window] | None:
  """Where a region and a window of its parameter meet: indices into the window's own
  array and into the region's; None if nowhere. window: None is the whole parameter.
  """
  window = window if window is not None else tuple(slice(0, n) for n in region.shape)
  theirs, ours = [], []
  for want, start, size in zip(window, region.offset, region.extent, strict=True):
    low, high = max(want.start, start), min(want.stop, start + size)
    if low >= high:
      return None
    theirs.append(slice(low - want.start, high - want.start))
    ours.append(slice(low - start, high - start))
  return tuple(theirs), tuple(ours)


def assemble(
  shards: Sequence[Shard], windows: Mapping[str, Window] | None = None
) -> Params:
  """Nested dicts of read-only arrays, each parameter whole or its window.

  A parameter that came in one piece is a view of it; others are put together anew.
  Raises ValueError when pieces do not cover what is wanted.
  """
  windows = windows or {}
  pieces: dict[str, list[Shard]] = {}
  for shard in shards:
    pieces.setdefault(shard.region.name, []).append(shard)
  named = {name: _join(name, them, windows.get(name)) for name, them in pieces.items()}
  return nest(named)


def _join(name: str, pieces: list[Shard], window: Window | None) -> np.ndarray:
  region = pieces[0].region
  arrays = [p.words.view(p.region.dtype).reshape(p.region.extent) for p in pieces]
  if window is None and region.extent == region.shape:
    found = arrays[0]
  else:
    bounds = window or tuple(slice(0, n) for n in region.shape)
    found = np.empty([s.stop - s.start for s in bounds], region.dtype)
    covered = 0
    for piece, array in zip(pieces, arrays, strict=True):
      met = overlap(piece.region, bounds)
      if met is not None:
        found[met[0]] = array[met[1]]
        covered += found[met[0]].size
    if covered != found.size:
      raise ValueError(f'{name}: its pieces cover {covered} of {found.size} elements')
  found = found.view()
  found.flags.writeable = False
  return found
