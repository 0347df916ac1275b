"""Qwen3.5, dense and with experts: its text model, and a tower that sees images."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxrl.models.families import qwen3_next, qwen3_vl
from jaxrl.models.families.family_spec import ConfigFields, ConfigJson, FamilySpec
from jaxrl.options import JsonObject

if TYPE_CHECKING:
  from jaxrl.models.model_config import ModelConfig


def _random_options(
  *,
  tie_embeddings: bool = True,
  rope_sections: tuple[int, ...] = (2, 1, 1),
  tower_layers: int = 4,
  tower_width: int = 128,
  tower_heads: int = 4,
  tower_mlp: int = 384,
  num_positions: int = 64,
  patch_size: int = 8,
  min_pixels: int = 256,
  max_pixels: int = 65536,
) -> ConfigFields:
  return qwen3_vl.random_options(
    tie_embeddings=tie_embeddings,
    rope_sections=rope_sections,
    tower_layers=tower_layers,
    tower_width=tower_width,
    tower_heads=tower_heads,
    tower_mlp=tower_mlp,
    deepstack_layers=(),
    num_positions=num_positions,
    patch_size=patch_size,
    min_pixels=min_pixels,
    max_pixels=max_pixels,
  )


def _with_tower(text: FamilySpec, model_type: str, architecture: str) -> FamilySpec:
  """Returns the family of a text model with a vision tower."""

  def read(data: ConfigJson, where: str) -> ConfigFields:
    text_config = data.get('text_config')
    if not isinstance(text_config, Mapping):
      raise ValueError(f'{where}: model_type {model_type!r} needs a text_config')
    text_config, sections = qwen3_vl.split_sections(text_config, where, (11, 11, 10))
    fields = text.read_config(text_config, f'{where}: text_config')
    tied = data.get('tie_word_embeddings', fields['tie_embeddings'])
    vision = qwen3_vl.read_vision(data, where, fields['hidden_size'], deepstack=())
    return fields | {
      'tie_embeddings': tied,
      'rope_sections': sections,
      'vision': vision,
    }

  def write(config: 'ModelConfig') -> JsonObject:
    text_config = text.write_config(config)
    scaling = text_config.get('rope_scaling') or {'rope_type': 'default'}
    vision_settings = qwen3_vl.write_vision(config)
    del vision_settings['vision_config']['deepstack_visual_indexes']
    vision_settings['vision_config']['model_type'] = model_type
    return {
      'text_config': {
        **text_config,
        'model_type': text.model_type,
        'rope_scaling': scaling | qwen3_vl.write_sections(config),
      },
      **vision_settings,
      'tie_word_embeddings': config.tie_embeddings,
    }

  @functools.wraps(_random_options)  # whose signature call strings read
  def random(**options: Any) -> ConfigFields:
    return text.random_options() | _random_options(**options)

  kept = {name: what for name, what in text.skipped_tensors.items() if 'mtp' in name}
  return dataclasses.replace(
    text,
    model_type=model_type,
    architecture=architecture,
    read_config=read,
    write_config=write,
    top_tensors=qwen3_vl.within_language_model(text.top_tensors),
    layer_tensors=qwen3_vl.within_language_model(text.layer_tensors),
    tower_tensors=qwen3_vl.TOWER_TENSORS,
    skipped_tensors=kept,
    random_options=random,
  )


QWEN3_5 = _with_tower(qwen3_next.QWEN3_5, 'qwen3_5', 'Qwen3_5ForConditionalGeneration')
QWEN3_5_MOE = _with_tower(
  qwen3_next.QWEN3_5_MOE, 'qwen3_5_moe', 'Qwen3_5MoeForConditionalGeneration'
)
