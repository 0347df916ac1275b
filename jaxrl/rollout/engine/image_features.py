"""Features of images on an engine's device, each computed once per weights version.

The features of an image come from a program of its own, whose shape depends on the size
of that image alone. They are kept in a table, of which prefill reads rows, so that a
request's bits depend on no other request.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models import kv_cache
from jaxrl.models.kv_cache import Cache
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.models.vision import image_places, vision_tower
from jaxrl.models.vision.image_places import ImagePlaces, PatchRows
from jaxrl.models.vision.patch_processor import PatchProcessor
from jaxrl.types import AnyArray, Array, Params, Pixels

MIN_FEATURES = 1024  # rows of the table at first


def check_prompt(
  processor: PatchProcessor, prompt: np.ndarray, images: Sequence[Pixels]
) -> str:
  """Says what is wrong with the images of a prompt; '' if nothing is.

  Args:
    processor: Cuts the images.
    prompt: `[P]` int32.
    images: Its images.
  """
  try:
    grids = [processor.grid(image) for image in images]
    starts, _, _ = image_places.place_images(processor.vision, prompt, grids)
  except ValueError as error:
    return str(error)
  if starts[-1] + processor.num_tokens(images[-1]) >= len(prompt):
    return 'its prompt ends with an image: a token of text must follow'
  return ''


def position_shift(
  processor: PatchProcessor, prompt: np.ndarray, images: Sequence[Pixels]
) -> int:
  """Returns what positions after a prompt differ by from the indices of its tokens.

  Args:
    processor: Cuts the images.
    prompt: `[P]` int32.
    images: Its images.
  """
  grids = [processor.grid(image) for image in images]
  return image_places.place_images(processor.vision, prompt, grids)[2]


class ImageFeatures:
  """Prefills prompts that have images.

  Args:
    model: The model, which sees images.
    sharding: Where weights and cache lie.
  """

  def __init__(self, model: TransformerLM, sharding: jax.sharding.Sharding):
    assert model.config.vision is not None
    self.processor = PatchProcessor(model.config.vision)
    self._model, self._sharding = model, sharding
    self._merged = model.config.vision.merged
    self._write = jax.jit(functools.partial(_write, model), donate_argnums=0)
    self._prefill = jax.jit(functools.partial(_prefill, model), donate_argnums=1)
    self._table: Params | None = None
    self._version = -1
    self._first: dict[str, int] = {}  # digest → the image's first row of the table
    self._used = 0

  def prefill(
    self,
    params: Params,
    version: int,
    cache: Cache,
    prompts: tuple[np.ndarray, np.ndarray, np.ndarray],
    images: Sequence[Sequence[Pixels]],
  ) -> Cache:
    """Computes keys and values of prompts with images.

    Args:
      params: What `ModelRunner.prepare_params` returned.
      version: The weights version.
      cache: The cache; it is donated.
      prompts: Tokens `[B, T]`, lengths `[B]` and slots `[B]`, without last tokens.
      images: The images of each prompt; of padding, none.

    Returns:
      The updated cache.
    """
    tokens, lengths, _ = prompts
    unique = {
      image.digest: image for prompt_images in images for image in prompt_images
    }
    self._hold(params, version, list(unique.values()))
    assert self._table is not None
    features = np.zeros(tokens.shape, np.int32)
    places = np.arange(tokens.shape[1], dtype=np.int32)[None, :, None]
    places = np.broadcast_to(places, (*tokens.shape, 3)).copy()
    for row, prompt_images in enumerate(images):
      if not prompt_images:
        continue
      grids = [self.processor.grid(image) for image in prompt_images]
      length = lengths[row]
      starts, row_places, _ = image_places.place_images(
        self.processor.vision, tokens[row, :length], grids
      )
      places[row, :length] = row_places
      for image, start in zip(prompt_images, starts, strict=True):
        size = self.processor.num_tokens(image)
        first = self._first[image.digest] + 1
        features[row, start : start + size] = np.arange(first, first + size)
    where = ImagePlaces(features, places)
    return self._prefill(params, cache, *prompts, self._table, where)

  def _hold(self, params: Params, version: int, images: Sequence[Pixels]) -> None:
    """Ensures that the table has the features of images."""
    if version != self._version:
      self._version, self._first, self._used = version, {}, 0
    missing = [image for image in images if image.digest not in self._first]
    needed = sum(map(self._padded, missing))
    if self._table is None or self._used + needed > self._size:
      self._first, self._used, missing = {}, 0, list(images)
      self._resize(sum(map(self._padded, missing)))
    for image in missing:
      rows, _ = image_places.pack_patches(self.processor, [image])
      first = np.int32(self._used)
      self._table = self._write(self._table, params['vision'], rows, first)
      self._first[image.digest] = self._used
      self._used += self._padded(image)

  def _padded(self, image: Pixels) -> int:
    """Returns the number of rows that an image takes, with padding."""
    patches = self.processor.num_tokens(image) * self._merged
    return image_places.power_of_two(patches) // self._merged

  @property
  def _size(self) -> int:
    return 0 if self._table is None else self._table['features'].shape[0]

  def _resize(self, needed: int) -> None:
    """Makes room for `needed` rows at least."""
    size = max(MIN_FEATURES, image_places.power_of_two(needed))
    if size <= self._size:
      return
    config, dtype = self._model.config, self._model.dtype
    vision = self.processor.vision
    shape = size, config.hidden_size
    table = {
      'features': np.zeros(shape, dtype),
      'deep': np.zeros((len(vision.deepstack_layers), *shape), dtype),
    }
    self._table = jax.device_put(table, self._sharding)


def _write(
  model: TransformerLM, table: Params, tower: Params, rows: PatchRows, first: Array
) -> Params:
  """Writes the features of an image into the table, from row `first` on."""
  outputs = vision_tower.features(model.config, tower, rows, dtype=model.dtype)
  zero = jnp.int32(0)
  return {
    'features': jax.lax.dynamic_update_slice(
      table['features'], outputs['features'], (first, zero)
    ),
    'deep': jax.lax.dynamic_update_slice(
      table['deep'], outputs['deep'], (zero, first, zero)
    ),
  }


def _prefill(
  model: TransformerLM,
  params: Params,
  cache: Cache,
  tokens: Array,
  lengths: Array,
  slots: Array,
  table: AnyArray,
  places: ImagePlaces,
) -> Cache:
  params = params | {'vision': table}
  _, kept = model.prefill(params, tokens, lengths, places)
  return kv_cache.insert(cache, kept, jnp.arange(tokens.shape[0]), slots)
