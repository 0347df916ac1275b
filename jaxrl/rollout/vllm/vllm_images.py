"""Prompts with images, in the form that vLLM takes them."""

from collections.abc import Sequence

import numpy as np

from jaxrl.models.vision import image_places
from jaxrl.models.vision.patch_processor import PatchProcessor
from jaxrl.options import Keywords
from jaxrl.rollout.engine.engine_base import ImageError
from jaxrl.types import Pixels


def make_prompt(
  processor: PatchProcessor, tokens: np.ndarray, images: Sequence[Pixels]
) -> Keywords:
  """Returns the fields of vLLM's `TokensPrompt` for a prompt with images.

  vLLM writes one placeholder as many times as an image has features, so that each run
  of placeholders becomes one. Images are resized as the learner resizes them, which
  leaves nothing to vLLM, whose interpolation differs.

  Args:
    processor: Cuts the images; it says which runs of placeholders are theirs.
    tokens: `[P]` int32, the prompt.
    images: Its images, in the order of their runs of placeholders.

  Returns:
    The fields.

  Raises:
    ValueError: If placeholders and images do not match.
  """
  grids = [processor.grid(image) for image in images]
  starts, *_ = image_places.place_images(processor.vision, tokens, grids)
  keep = np.ones(len(tokens), bool)
  for start, image in zip(starts, images, strict=True):
    keep[start + 1 : start + processor.num_tokens(image)] = False
  return {
    'prompt_token_ids': tokens[keep].tolist(),
    'multi_modal_data': {'image': [processor.resize(image) for image in images]},
    'multi_modal_uuids': {'image': [image.digest for image in images]},
  }


def check_expanded(tokens: np.ndarray, expanded: Sequence[int] | None) -> None:
  """Checks that vLLM served the prompt that it was given.

  Args:
    tokens: `[P]` int32, the prompt.
    expanded: The prompt with all placeholders, as vLLM reports it.

  Raises:
    ImageError: If they differ, as for a prompt in which a model wrote placeholders.
  """
  if expanded is None or list(expanded) != tokens.tolist():
    raise ImageError(
      'vLLM places the images of this prompt elsewhere: its settings of images differ, '
      'or a reply in it contains placeholders'
    )
