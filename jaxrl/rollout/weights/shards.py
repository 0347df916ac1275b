"""Shards describe which piece of which parameter a process holds.

A `Region` is a box of a parameter, a `Shard` is a region and its contents. Shards are
what a learner's process publishes, and what engines assemble into parameters.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import jax
import ml_dtypes  # noqa: F401  (numpy learns its dtypes by name from this)
import numpy as np

from jaxrl.types import AnyArray, Params, PyTree

Window = tuple[slice, ...]
SAFETENSORS_DTYPES = {  # the dtypes that weights may have, and their safetensors names
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
  """A box of a parameter.

  Attributes:
    name: Dotted path of the parameter.
    dtype: Numpy's name of its dtype.
    shape: Shape of the whole parameter.
    offset: Index at which the box starts.
    extent: Shape of the box.
  """

  name: str
  dtype: str
  shape: tuple[int, ...]
  offset: tuple[int, ...]
  extent: tuple[int, ...]

  @property
  def size(self) -> int:
    """Returns the number of elements."""
    return math.prod(self.extent)

  @property
  def itemsize(self) -> int:
    """Returns the number of bytes of an element."""
    return np.dtype(self.dtype).itemsize

  @property
  def window(self) -> Window:
    """Returns the box as an index into the whole parameter."""
    return tuple(slice(o, o + e) for o, e in zip(self.offset, self.extent, strict=True))

  def chunk_bounds(self, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields (start, count) of chunks of the box, which is flattened in C order.

    Args:
      chunk_bytes: The most bytes of a chunk, which has at least one element.

    Yields:
      The chunks' first element and number of elements, in order.
    """
    step = max(1, chunk_bytes // self.itemsize)
    for start in range(0, self.size, step):
      yield start, min(step, self.size - start)


@dataclasses.dataclass(frozen=True)
class Shard:
  """A region and its contents.

  Attributes:
    region: The region.
    bits: `[size]` flat unsigned integers with the bits of the elements.
    base_bits: The very `bits` array of the version before that `changed_indices` refers
      to; None if the two versions were not compared.
    changed_indices: Ascending indices where `bits` and `base_bits` differ; None if the
      two versions were not compared.
  """

  region: Region
  bits: np.ndarray
  base_bits: np.ndarray | None = None
  changed_indices: np.ndarray | None = None


def as_uint_view(array: np.ndarray) -> np.ndarray:
  """Returns the bits of a C-contiguous array as flat unsigned integers `[size]`."""
  return array.reshape(-1).view(f'u{array.dtype.itemsize}')


def flatten(params: Params) -> dict[str, AnyArray]:
  """Returns the leaves of nested dicts by their dotted names.

  Raises:
    ValueError: The tree is made of something else, or a key is not a plain name.
  """
  leaves: dict[str, AnyArray] = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    keys = [getattr(key, 'key', None) for key in path]
    if not all(isinstance(key, str) and key and '.' not in key for key in keys):
      where = jax.tree_util.keystr(path)
      raise ValueError(f'{where}: weights are nested dicts with plain names as keys')
    leaves['.'.join(keys)] = leaf  # pyright: ignore
  return leaves


def unflatten(leaves: Mapping[str, AnyArray]) -> Params:
  """Returns the nested dicts of dotted names; the inverse of `flatten`."""
  tree: dict[str, PyTree] = {}
  for name, leaf in leaves.items():
    *parents, last = name.split('.')
    node = tree
    for parent in parents:
      node = node.setdefault(parent, {})
    node[last] = leaf
  return tree


def make_region(
  name: str, shape: Sequence[int], piece: AnyArray, index: Window | None = None
) -> Region:
  """Returns the region that `piece` is of a parameter.

  Args:
    name: Dotted path of the parameter.
    shape: Shape of the whole parameter.
    piece: An array, or anything with a shape and a dtype.
    index: Where the piece lies in the parameter; None if it is all of it.

  Raises:
    ValueError: The dtype is not one of `SAFETENSORS_DTYPES`.
  """
  if piece.dtype.name not in SAFETENSORS_DTYPES:
    raise ValueError(f'{name}: weights of dtype {piece.dtype} cannot be sent')
  index = index or (slice(0, None),) * len(piece.shape)
  offset = tuple(s.start or 0 for s in index)
  return Region(name, piece.dtype.name, tuple(shape), offset, tuple(piece.shape))


def overlap(region: Region, window: Window | None) -> tuple[Window, Window] | None:
  """Returns where a region and a window of its parameter overlap.

  Args:
    region: The region.
    window: The window; None for the whole parameter.

  Returns:
    The overlap as an index into the window's own array and as one into the region's;
    None if there is none.
  """
  if window is None:
    window = tuple(slice(0, size) for size in region.shape)
  in_window, in_region = [], []
  for wanted, start, size in zip(window, region.offset, region.extent, strict=True):
    low, high = max(wanted.start, start), min(wanted.stop, start + size)
    if low >= high:
      return None
    in_window.append(slice(low - wanted.start, high - wanted.start))
    in_region.append(slice(low - start, high - start))
  return tuple(in_window), tuple(in_region)


def assemble(
  shards: Sequence[Shard], windows: Mapping[str, Window] | None = None
) -> Params:
  """Puts shards together.

  Args:
    shards: The shards, in any order.
    windows: By parameter, the slice of it that is wanted; others are wanted whole.

  Returns:
    Nested dicts of read-only arrays, each parameter whole or its window. A parameter
    that came in one piece is a view of it; others are new arrays.

  Raises:
    ValueError: The pieces do not cover what is wanted.
  """
  windows = windows or {}
  shards_of: dict[str, list[Shard]] = {}
  for shard in shards:
    shards_of.setdefault(shard.region.name, []).append(shard)
  return unflatten(
    {name: _join(name, s, windows.get(name)) for name, s in shards_of.items()}
  )


def _join(name: str, shards: list[Shard], window: Window | None) -> np.ndarray:
  region = shards[0].region
  arrays = [s.bits.view(s.region.dtype).reshape(s.region.extent) for s in shards]
  if window is None and region.extent == region.shape:
    joined = arrays[0]
  else:
    bounds = window or tuple(slice(0, size) for size in region.shape)
    joined = np.empty([s.stop - s.start for s in bounds], region.dtype)
    covered = 0
    for shard, array in zip(shards, arrays, strict=True):
      common = overlap(shard.region, bounds)
      if common is not None:
        in_window, in_region = common
        joined[in_window] = array[in_region]
        covered += joined[in_window].size
    if covered != joined.size:
      raise ValueError(f'{name}: its pieces cover {covered} of {joined.size} elements')
  joined = joined.view()
  joined.flags.writeable = False
  return joined
