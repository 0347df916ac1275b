"""Where images stand: their features among tokens, and their patches in rows.

The runs of placeholder tokens in a sequence belong to its images, in order. The next
image stands at the next run that is exactly as long as its features: a placeholder that
a model has drawn itself is not an image, but a token like any other.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models import rope
from jaxrl.models.model_config import ModelConfig, VisionConfig
from jaxrl.models.vision.patch_processor import Grid, PatchProcessor, Pixels
from jaxrl.types import AnyArray, Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ImagePlaces:
  """Says which feature stands at each token, and where tokens stand.

  Attributes:
    features: `[B, T]` int32, 1 + the number of the feature at a token; 0 for none.
    positions: `[B, T, 3]` int32, in time, row and column; equal for text.
  """

  features: AnyArray
  positions: AnyArray

  def rotations(self, config: ModelConfig) -> dict[str, rope.Rotation]:
    """Computes the rotations of all layers; see `rope.rotations`.

    Args:
      config: The model's shape.
    """
    return rope.rotations(config, self.positions, by_axis=True)

  def merge(self, params: Params, x: jax.Array) -> jax.Array:
    """Puts features in the place of the embeddings of placeholders.

    Args:
      params: The parameters, with 'vision' as `vision_tower.encode` returns it.
      x: `[B, T, D]`, embedded tokens.

    Returns:
      `[B, T, D]`.
    """
    features = params['vision']['features'][jnp.maximum(self.features - 1, 0)]
    return jnp.where(self.features[..., None] > 0, features.astype(x.dtype), x)

  def deepen(self, params: Params, x: jax.Array, layer: jax.Array) -> jax.Array:
    """Adds the features taken between the tower's layers.

    Args:
      params: As in `merge`.
      x: `[B, T, D]`, what a layer returned.
      layer: The layer's number.

    Returns:
      `[B, T, D]`.
    """
    deep = params['vision']['deep']  # [n, M, D]
    count = deep.shape[0]
    if not count:
      return x

    def add(x: jax.Array) -> jax.Array:
      features = deep[jnp.minimum(layer, count - 1), jnp.maximum(self.features - 1, 0)]
      return x + jnp.where(self.features[..., None] > 0, features, 0).astype(x.dtype)

    return jax.lax.cond(layer < count, add, lambda x: x, x)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PatchRows:
  """Patches of images, packed into rows; what is merged follows one another.

  Attributes:
    patches: `[R, L, P]` float32, 0 at padding.
    image_ids: `[R, L]` int32, numbers of a row's images from 1 on; 0 at padding.
    places: `[R, L, 2]` int32, a patch's row and column in its image.
    grid_index: `[R, L, 4]` int32, learned positions around it.
    grid_weights: `[R, L, 4]` float32, the share of each.
  """

  patches: AnyArray
  image_ids: AnyArray
  places: AnyArray
  grid_index: AnyArray
  grid_weights: AnyArray


class PlacementError(ValueError):
  """Placeholders and images of a sequence do not match.

  Attributes:
    sequence: The number of the sequence.
  """

  def __init__(self, message: str, sequence: int = 0):
    super().__init__(message)
    self.sequence = sequence


def find_runs(vision: VisionConfig, tokens: np.ndarray) -> list[tuple[int, int]]:
  """Finds the runs of placeholders in a sequence.

  Args:
    vision: The tower's config.
    tokens: `[T]` int32.

  Returns:
    The first index and the length of each.
  """
  is_image = np.concatenate([[False], tokens == vision.image_token, [False]])
  edges = np.flatnonzero(is_image[1:] != is_image[:-1])
  return [(int(a), int(b - a)) for a, b in edges.reshape(-1, 2)]


def place_images(
  vision: VisionConfig, tokens: np.ndarray, grids: Sequence[Grid]
) -> tuple[list[int], np.ndarray, int]:
  """Finds the places of a sequence's images, and the positions of its tokens.

  An image of h × w features takes the positions p + row and p + column, and the token
  after it is at p + max(h, w).

  Args:
    vision: The tower's config.
    tokens: `[T]` int32.
    grids: The grid of each image.

  Returns:
    The index at which each image begins; positions `[T, 3]` int32; and what positions
    of later tokens differ by from their indices.

  Raises:
    PlacementError: If placeholders and images do not match.
  """
  runs, starts = iter(find_runs(vision, tokens)), []
  positions = np.arange(len(tokens), dtype=np.int32)[:, None].repeat(3, axis=1)
  shift = 0
  for number, grid in enumerate(grids):
    rows, columns = grid[1] // vision.merge_size, grid[2] // vision.merge_size
    size = rows * columns
    start = next((start for start, length in runs if length == size), None)
    if start is None:
      lengths = [length for _, length in find_runs(vision, tokens)]
      raise PlacementError(
        f'image {number + 1} of {len(grids)} needs a run of {size} placeholder tokens '
        f'({vision.image_token}) after those of the images before; the tokens have '
        f'runs of {lengths[:20]}'
      )
    starts.append(start)
    first, end = start + shift, start + size
    places = np.indices((1, rows, columns), np.int32).reshape(3, -1).T
    positions[start:end] = first + places
    shift += max(rows, columns) - size
    positions[end:] = np.arange(end, len(tokens), dtype=np.int32)[:, None] + shift
  return starts, positions, shift


def patch_places(vision: VisionConfig, grid: Grid) -> tuple[np.ndarray, ...]:
  """Computes where an image's patches stand in it, and among the learned positions.

  Args:
    vision: The tower's config.
    grid: The image's grid.

  Returns:
    places `[n, 2]` int32, grid_index `[n, 4]` int32 and grid_weights `[n, 4]` float32,
    as in `PatchRows`.
  """
  _, rows, columns = grid
  merge = vision.merge_size
  row, column = (
    x.reshape(rows // merge, merge, columns // merge, merge).swapaxes(1, 2).reshape(-1)
    for x in np.indices((rows, columns), np.int32)
  )
  side = math.isqrt(vision.num_positions)

  def around(index: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    at = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    low = np.floor(at)
    near = np.stack([low, low + 1], axis=1)
    weights = np.maximum(1 - np.abs(at[:, None] - near), 0).astype(np.float32)
    return np.clip(near.astype(np.int32), 0, side - 1), weights

  (row_near, row_share), (column_near, column_share) = (
    around(row, rows),
    around(column, columns),
  )
  index = row_near[:, :, None] * side + column_near[:, None, :]
  weights = row_share[:, :, None] * column_share[:, None, :]
  places = np.stack([row, column], axis=1)
  return places, index.reshape(-1, 4), weights.reshape(-1, 4)


def pack_patches(
  processor: PatchProcessor, images: Sequence[Pixels], multiple: int = 1
) -> tuple[PatchRows, list[int]]:
  """Packs the patches of images into rows of few sizes.

  Rows are as long as the next power of two from the largest image on, and their number
  is the next power of two, times `multiple`.

  Args:
    processor: Cuts the images.
    images: The images, each once.
    multiple: What the number of rows is a multiple of.

  Returns:
    The rows, and the number of each image's first feature.
  """
  vision = processor.vision
  grids = [processor.grid(image) for image in images]
  sizes = [math.prod(grid) for grid in grids]
  length = power_of_two(max(sizes))
  used: list[int] = []
  at = [(0, 0)] * len(images)
  for i in sorted(range(len(images)), key=lambda i: -sizes[i]):
    row = next((r for r, n in enumerate(used) if n + sizes[i] <= length), len(used))
    if row == len(used):
      used.append(0)
    at[i] = row, used[row]
    used[row] += sizes[i]
  count = multiple * power_of_two(-(-len(used) // multiple))
  rows = empty_rows(vision, count, length)
  numbers = [0] * count
  for image, grid, size, (row, start) in zip(images, grids, sizes, at, strict=True):
    span = slice(start, start + size)
    rows.patches[row, span], _ = processor.patches(image)
    numbers[row] += 1
    rows.image_ids[row, span] = numbers[row]
    patch_arrays = patch_places(vision, grid)
    for array, values in zip(
      (rows.places, rows.grid_index, rows.grid_weights), patch_arrays, strict=True
    ):
      array[row, span] = values
  return rows, [(row * length + start) // vision.merged for row, start in at]


def empty_rows(vision: VisionConfig, count: int, length: int) -> PatchRows:
  """Returns numpy rows of padding.

  Args:
    vision: The tower's config.
    count: Rows.
    length: Patches of a row.
  """
  make = functools.partial(np.zeros, dtype=np.int32)
  return PatchRows(
    patches=np.zeros((count, length, math.prod(vision.patch_shape)), np.float32),
    image_ids=make((count, length)),
    places=make((count, length, 2)),
    grid_index=make((count, length, 4)),
    grid_weights=np.zeros((count, length, 4), np.float32),
  )


def power_of_two(size: int) -> int:
  """Returns the least power of two from `size` on."""
  return 1 << max(0, size - 1).bit_length()


def lay_out(
  processor: PatchProcessor,
  sequences: Sequence[tuple[np.ndarray, Sequence[Pixels]]],
  shape: tuple[int, int],
  multiple: int = 1,
) -> tuple[ImagePlaces, PatchRows | None]:
  """Places the images of several sequences; one that occurs twice is packed once.

  Args:
    processor: Cuts the images.
    sequences: Tokens `[t]` and images of each.
    shape: Rows B, at least as many as sequences, and their length T.
    multiple: What the number of rows of patches is a multiple of.

  Returns:
    Where images stand, as numpy arrays, and their patches; None without any image.

  Raises:
    PlacementError: If placeholders and images do not match.
  """
  vision = processor.vision
  unique = {image.digest: image for _, images in sequences for image in images}
  rows, firsts = None, []
  if unique:
    rows, firsts = pack_patches(processor, list(unique.values()), multiple)
  first = dict(zip(unique, firsts, strict=True))
  features = np.zeros(shape, np.int32)
  positions = np.arange(shape[1], dtype=np.int32)[None, :, None]
  positions = np.broadcast_to(positions, (*shape, 3)).copy()
  for i, (tokens, images) in enumerate(sequences):
    grids = [processor.grid(image) for image in images]
    try:
      starts, positions[i, : len(tokens)], _ = place_images(vision, tokens, grids)
    except PlacementError as error:
      raise PlacementError(str(error), i) from error
    for image, grid, start in zip(images, grids, starts, strict=True):
      size = math.prod(grid) // vision.merged
      numbers = np.arange(first[image.digest], first[image.digest] + size)
      features[i, start : start + size] = numbers + 1
  return ImagePlaces(features, positions), rows
