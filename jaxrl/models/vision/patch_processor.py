"""Cuts images into patches, as the image processor of a checkpoint does.

The settings are those of the checkpoint's preprocessor_config.json; what comes out is
what `transformers.Qwen2VLImageProcessorPil` computes.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from jaxrl.models.model_config import VisionConfig
from jaxrl.options import JsonObject
from jaxrl.types import Pixels

MAX_ASPECT = 200  # of the longer side to the shorter
Grid = tuple[int, int, int]  # frames, rows and columns of patches
# Settings of a preprocessor_config.json that have one supported value.
FIXED_SETTINGS = {
  'do_resize': True,
  'do_rescale': True,
  'do_normalize': True,
  'do_convert_rgb': True,
  'resample': 3,
  'rescale_factor': 1 / 255,
}


@dataclasses.dataclass(frozen=True)
class PatchProcessor:
  """Resizes images, and cuts them into patches.

  Attributes:
    vision: The tower that they are for.
  """

  vision: VisionConfig

  @property
  def image_token_id(self) -> int:
    """Returns the id of the placeholder token."""
    return self.vision.image_token

  def grid(self, image: Pixels) -> Grid:
    """Returns how many patches an image has: 1 frame, rows and columns.

    Args:
      image: The image.

    Raises:
      ValueError: If it is too long and thin.
    """
    vision = self.vision
    height, width = resized(
      *(image.height, image.width, vision.patch_size * vision.merge_size),
      least=vision.min_pixels,
      most=vision.max_pixels,
    )
    return 1, height // vision.patch_size, width // vision.patch_size

  def num_tokens(self, image: Pixels) -> int:
    """Returns how many placeholder tokens stand for an image.

    Args:
      image: The image.

    Raises:
      ValueError: As `grid`.
    """
    return math.prod(self.grid(image)) // self.vision.merged

  def resize(self, image: Pixels) -> Any:
    """Resizes an image to whole patches.

    Args:
      image: The image.

    Returns:
      A PIL image.

    Raises:
      ValueError: As `grid`.
    """
    from PIL import Image  # text alone needs none

    _, rows, columns = self.grid(image)
    size = self.vision.patch_size
    return Image.fromarray(image.array()).resize(
      (columns * size, rows * size), Image.Resampling.BICUBIC
    )

  def patches(self, image: Pixels) -> tuple[np.ndarray, Grid]:
    """Resizes an image, and cuts it into patches.

    Args:
      image: The image.

    Returns:
      `[n, P]` float32, and the grid. Patches that are merged follow one another; in a
      patch the order is that of `VisionConfig.patch_shape`.

    Raises:
      ValueError: As `grid`.
    """
    vision, grid = self.vision, self.grid(image)
    _, rows, columns = grid
    size, merge = vision.patch_size, vision.merge_size
    pixels = self.resize(image)
    mean, std = (np.array(x, np.float32) for x in (vision.mean, vision.std))
    scaled = np.asarray(pixels).astype(np.float64) * (1 / 255)
    scaled = (scaled.astype(np.float32) - mean) / std
    cut = scaled.reshape(
      rows // merge, merge, size, columns // merge, merge, size, vision.channels
    )
    cut = cut.transpose(0, 3, 1, 4, 6, 2, 5)  # blocks, in them patches, in them pixels
    shape = (*cut.shape[:5], vision.frames_per_patch, *cut.shape[5:])
    cut = np.broadcast_to(cut[:, :, :, :, :, None], shape)
    return cut.reshape(rows * columns, -1), grid


def resized(
  height: int, width: int, factor: int, *, least: int, most: int
) -> tuple[int, int]:
  """Returns the size to which an image is resized.

  Sides become multiples of `factor`, their product lies between `least` and `most`, and
  their ratio stays nearly the same.

  Args:
    height: Pixels.
    width: Pixels.
    factor: What sides are multiples of.
    least: Least pixels in all.
    most: Most pixels in all.

  Raises:
    ValueError: If a side is more than 200 times the other.
  """
  if max(height, width) > MAX_ASPECT * min(height, width):
    raise ValueError(
      f'an image of {width} × {height} pixels is too long and thin: one side may be '
      f'{MAX_ASPECT} times the other at most'
    )
  rows, columns = (round(size / factor) * factor for size in (height, width))
  if rows * columns > most:
    shrink = math.sqrt(height * width / most)
    rows, columns = (
      max(factor, math.floor(size / shrink / factor) * factor)
      for size in (height, width)
    )
  elif rows * columns < least:
    grow = math.sqrt(least / (height * width))
    rows, columns = (
      math.ceil(size * grow / factor) * factor for size in (height, width)
    )
  return rows, columns


def read_settings(vision: VisionConfig, data: JsonObject, where: str) -> VisionConfig:
  """Returns a tower's config with the settings of a preprocessor_config.json.

  Args:
    vision: The tower's config.
    data: The contents.
    where: What error messages begin with.

  Raises:
    ValueError: If a setting is not supported, or not that of the tower.
  """
  fixed = FIXED_SETTINGS | {
    'patch_size': vision.patch_size,
    'temporal_patch_size': vision.frames_per_patch,
    'merge_size': vision.merge_size,
  }
  for name, value in fixed.items():
    setting = data.get(name, value)
    if setting is not None and not np.isclose(setting, value, rtol=1e-6):
      raise ValueError(f'{where}: {name}={setting!r} is not supported, only {value!r}')
  size = data.get('size') or {}
  least = data.get('min_pixels') or size.get('shortest_edge') or vision.min_pixels
  most = data.get('max_pixels') or size.get('longest_edge') or vision.max_pixels
  return dataclasses.replace(
    vision,
    min_pixels=int(least),
    max_pixels=int(most),
    mean=tuple(map(float, data.get('image_mean') or vision.mean)),
    std=tuple(map(float, data.get('image_std') or vision.std)),
  )


def write_settings(vision: VisionConfig) -> JsonObject:
  """Returns the contents of a preprocessor_config.json.

  Args:
    vision: The tower's config.
  """
  return {
    **FIXED_SETTINGS,
    'size': {'shortest_edge': vision.min_pixels, 'longest_edge': vision.max_pixels},
    'patch_size': vision.patch_size,
    'temporal_patch_size': vision.frames_per_patch,
    'merge_size': vision.merge_size,
    'image_mean': list(vision.mean),
    'image_std': list(vision.std),
    'image_processor_type': 'Qwen2VLImageProcessor',
    'processor_class': 'Qwen3VLProcessor',
  }
