"""Images of a batch: where they stand in its rows, and the patches of each, once."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxrl.models.model_config import VisionConfig
from jaxrl.models.vision import image_places
from jaxrl.models.vision.patch_processor import PatchProcessor
from jaxrl.types import Batch, Group


def add_to_batch(
  vision: VisionConfig | None, batch: Batch, groups: Sequence[Group], multiple: int
) -> Batch:
  """Adds the images of trajectories to a numpy batch.

  Args:
    vision: The model's tower.
    batch: The batch, whose first rows are those of the groups.
    groups: The trajectories.
    multiple: What the number of rows of patches is a multiple of.

  Returns:
    The batch with `image_features`, `image_positions` and `patch_rows`.

  Raises:
    ValueError: If the model sees no images, or a row's placeholders are not those of
      its images.
  """
  rows = [row for group in groups for row in group]
  if vision is None:
    seen = next(row for row in rows if row.images)
    raise ValueError(
      f'row {seen.trajectory_id} has images, and the model that is trained sees none: '
      'train one with a vision tower, such as of family qwen3_vl'
    )
  sequences = [(row.tokens, row.images) for row in rows]
  try:
    places, patches = image_places.lay_out(
      PatchProcessor(vision), sequences, batch.tokens.shape, multiple
    )
  except image_places.PlacementError as error:
    name = rows[error.sequence].trajectory_id
    raise ValueError(f'row {name}: {error}') from error
  return batch.replace(
    image_features=places.features,
    image_positions=places.positions,
    patch_rows=patches,
  )


def planned_patches(
  vision: VisionConfig | None, length: int, count: int, multiple: int
) -> tuple[int, int]:
  """Returns the size of the patches of images of a usual size, to plan with.

  Args:
    vision: The model's tower.
    length: Tokens of a row of the batch.
    count: How many images.
    multiple: What the number of rows of patches is a multiple of.

  Returns:
    Rows of patches, and their length.
  """
  assert vision is not None  # the caller has checked
  pixels = min(PLANNED_PIXELS, vision.max_pixels)
  patches = min(pixels // vision.patch_size**2, vision.merged * length // 2)
  rows = multiple * image_places.power_of_two(-(-count // multiple))
  return rows, image_places.power_of_two(max(patches, vision.merged))


PLANNED_PIXELS = 512 * 512


def field_shapes(
  vision: VisionConfig,
  rows: tuple[int, int],
  patches: tuple[int, int],
  layout: jax.sharding.Sharding,
) -> dict[str, object]:
  """Returns the shapes of the fields that `add_to_batch` adds.

  Args:
    vision: The model's tower.
    rows: Rows of the batch, and their length.
    patches: Rows of patches, and their length.
    layout: The sharding of rows.
  """

  def place(size: tuple[int, ...], dtype: object = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(size, dtype, sharding=layout)

  empty = image_places.empty_rows(vision, 1, 1)
  patch_rows = jax.tree.map(lambda x: place((*patches, *x.shape[2:]), x.dtype), empty)
  return {
    'image_features': place(rows),
    'image_positions': place((*rows, 3)),
    'patch_rows': patch_rows,
  }
