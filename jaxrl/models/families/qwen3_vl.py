"""Qwen3-VL, dense: Qwen3 that sees images, but no videos (arXiv 2511.21631)."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxrl.models.families import llama_style
from jaxrl.models.families.family_spec import (
  ConfigFields,
  ConfigJson,
  FamilySpec,
  StoredAs,
)
from jaxrl.options import JsonObject

if TYPE_CHECKING:
  from jaxrl.models.model_config import ModelConfig, VisionConfig

_ACTIVATION = 'gelu_pytorch_tanh'
# Field of VisionConfig → key in config.json, and what `transformers` assumes there.
_TOWER = {
  'num_layers': ('depth', 27),
  'hidden_size': ('hidden_size', 1152),
  'num_heads': ('num_heads', 16),
  'intermediate_size': ('intermediate_size', 4304),
  'num_positions': ('num_position_embeddings', 2304),
  'channels': ('in_channels', 3),
  'patch_size': ('patch_size', 16),
  'frames_per_patch': ('temporal_patch_size', 2),
  'merge_size': ('spatial_merge_size', 2),
}
_TOKENS = {
  'image_token': ('image_token_id', 151655),
  'video_token': ('video_token_id', 151656),
  'start_token': ('vision_start_token_id', 151652),
  'end_token': ('vision_end_token_id', 151653),
}


def read_vision(
  data: ConfigJson,
  where: str,
  hidden_size: int,
  deepstack: tuple[int, ...] = (8, 16, 24),
) -> 'VisionConfig':
  """Reads the tower's settings.

  Args:
    data: The contents of a config.json.
    where: What error messages begin with.
    hidden_size: The width of the language model.
    deepstack: The layers after which features are taken, where config.json is silent.

  Raises:
    ValueError: If a setting is not supported.
  """
  from jaxrl.models.model_config import VisionConfig

  vision_config = data.get('vision_config')
  if not isinstance(vision_config, Mapping):
    raise ValueError(f'{where}: vision_config must be given')
  fields = {ours: vision_config.get(*theirs) for ours, theirs in _TOWER.items()}
  fields |= {ours: data.get(*theirs) for ours, theirs in _TOKENS.items()}
  for name, value in fields.items():
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
      key = (_TOWER | _TOKENS)[name][0]
      raise ValueError(f'{where}: {key}={value!r} must be a whole number')
  fixed = {'hidden_act': _ACTIVATION, 'out_hidden_size': hidden_size}
  rope = vision_config.get('rope_parameters') or {}
  settings = {
    **vision_config,
    **{f'rope_{k.removeprefix("rope_")}': v for k, v in rope.items()},
  }
  for name, value in (fixed | {'rope_type': 'axial', 'rope_theta': 10000.0}).items():
    if settings.get(name, value) != value:
      raise ValueError(
        f'{where}: vision_config: {name}={settings[name]!r} is not supported, only '
        f'{value!r}'
      )
  deep = tuple(vision_config.get('deepstack_visual_indexes', deepstack))
  try:
    return VisionConfig(deepstack_layers=deep, **fields)
  except ValueError as error:
    raise ValueError(f'{where}: {error}') from error


def write_vision(config: 'ModelConfig') -> JsonObject:
  """Returns the tower's settings as config.json has them."""
  vision = config.vision
  assert vision is not None  # every model of such a family has one
  return {
    'vision_config': {
      'model_type': 'qwen3_vl',
      **{theirs: getattr(vision, ours) for ours, (theirs, _) in _TOWER.items()},
      'deepstack_visual_indexes': list(vision.deepstack_layers),
      'hidden_act': _ACTIVATION,
      'out_hidden_size': config.hidden_size,
    },
    **{theirs: getattr(vision, ours) for ours, (theirs, _) in _TOKENS.items()},
  }


def split_sections(
  text: ConfigJson, where: str, default: tuple[int, ...]
) -> tuple[JsonObject, tuple[int, ...]]:
  """Reads which frequencies turn by time, row and column.

  Args:
    text: The contents of text_config.
    where: What error messages begin with.
    default: The sections that `transformers` assumes.

  Returns:
    The contents without these settings, and the sections.

  Raises:
    ValueError: If frequencies are not interleaved.
  """
  key = 'rope_parameters' if text.get('rope_parameters') else 'rope_scaling'
  rope = dict(text.get(key) or {})
  if not rope.pop('mrope_interleaved', True):
    raise ValueError(f'{where}: mrope_interleaved=False is not supported, only True')
  return {**text, key: rope}, tuple(rope.pop('mrope_section', default))


def write_sections(config: 'ModelConfig') -> JsonObject:
  """Returns what config.json says of the frequencies of time, row and column."""
  return {'mrope_interleaved': True, 'mrope_section': list(config.rope_sections)}


def _read(data: ConfigJson, where: str) -> ConfigFields:
  text = data.get('text_config')
  if not isinstance(text, Mapping):
    raise ValueError(f'{where}: text_config must be given')
  text, sections = split_sections(text, where, (24, 20, 20))
  fields = llama_style.read_settings(
    text,
    f'{where}: text_config',
    max_position=128000,
    num_kv_heads=32,
    head_dim=128,
    rope_theta=500000.0,
  )
  return fields | {
    'tie_embeddings': data.get('tie_word_embeddings', fields['tie_embeddings']),
    'attention_bias': bool(text.get('attention_bias', False)),
    'qk_norm': True,
    'rope_sections': sections,
    'vision': read_vision(data, where, fields['hidden_size']),
  }


def _write(config: 'ModelConfig') -> JsonObject:
  text = llama_style.write_settings(config)
  scaling = text['rope_scaling'] or {'rope_type': 'default'}
  return {
    'text_config': {
      **text,
      'model_type': 'qwen3_vl_text',
      'attention_bias': config.attention_bias,
      'rope_scaling': scaling | write_sections(config),
    },
    **write_vision(config),
    'tie_word_embeddings': config.tie_embeddings,
  }


def random_options(
  *,
  tie_embeddings: bool = True,
  rope_sections: tuple[int, ...] = (6, 5, 5),
  tower_layers: int = 4,
  tower_width: int = 128,
  tower_heads: int = 4,
  tower_mlp: int = 384,
  deepstack_layers: tuple[int, ...] = (0, 1, 2),
  num_positions: int = 64,
  patch_size: int = 8,
  min_pixels: int = 256,
  max_pixels: int = 65536,
) -> ConfigFields:
  """Returns the `ModelConfig` fields that a call string sets for a random model.

  Args:
    tie_embeddings: Whether tokens are scored by the table that embeds them.
    rope_sections: How many frequencies turn by time, row and column.
    tower_layers: Layers of the tower.
    tower_width: Their width.
    tower_heads: Their attention heads.
    tower_mlp: Inner width of their MLPs.
    deepstack_layers: Those after which features are taken.
    num_positions: Learned positions, of a square grid.
    patch_size: Pixels of a patch's side.
    min_pixels: The least pixels that an image is resized to.
    max_pixels: The most.
  """
  from jaxrl.models.model_config import VisionConfig

  vision = VisionConfig(
    num_layers=tower_layers,
    hidden_size=tower_width,
    num_heads=tower_heads,
    intermediate_size=tower_mlp,
    deepstack_layers=tuple(deepstack_layers),
    num_positions=num_positions,
    patch_size=patch_size,
    min_pixels=min_pixels,
    max_pixels=max_pixels,
  )
  return {
    'tie_embeddings': tie_embeddings,
    'rope_sections': tuple(rope_sections),
    'vision': vision,
  }


def _linear(ours: str, theirs: str) -> dict[str, str]:
  return {f'{ours}.kernel': f'{theirs}.weight', f'{ours}.bias': f'{theirs}.bias'}


def _norm(ours: str, theirs: str) -> dict[str, str]:
  return {f'{ours}.scale': f'{theirs}.weight', f'{ours}.bias': f'{theirs}.bias'}


def _merger(ours: str, theirs: str) -> dict[str, str]:
  return {
    **_norm(f'{ours}.norm', f'{theirs}.norm'),
    **_linear(f'{ours}.mlp.up', f'{theirs}.linear_fc1'),
    **_linear(f'{ours}.mlp.down', f'{theirs}.linear_fc2'),
  }


_VISUAL = 'model.visual.'
_BLOCK = f'{_VISUAL}blocks.{{layer}}.'
# Parameter below 'vision' → name in a checkpoint.
TOWER_TENSORS = {
  **_linear('patch_embedding', f'{_VISUAL}patch_embed.proj'),
  'positions': f'{_VISUAL}pos_embed.weight',
  **_norm('layers.attention_norm', f'{_BLOCK}norm1'),
  **_linear('layers.qkv', f'{_BLOCK}attn.qkv'),
  **_linear('layers.out', f'{_BLOCK}attn.proj'),
  **_norm('layers.mlp_norm', f'{_BLOCK}norm2'),
  **_linear('layers.mlp.up', f'{_BLOCK}mlp.linear_fc1'),
  **_linear('layers.mlp.down', f'{_BLOCK}mlp.linear_fc2'),
  **_merger('merger', f'{_VISUAL}merger'),
  **_merger('deepstack', f'{_VISUAL}deepstack_merger_list.{{layer}}'),
}


def within_language_model(
  tensors: Mapping[str, str | StoredAs],
) -> dict[str, Any]:
  """Returns names of tensors as checkpoints that see images have them.

  Args:
    tensors: Parameter → name, or `StoredAs`, in a checkpoint of text alone.
  """

  def moved(name: str) -> str:
    return name.replace('model.', 'model.language_model.', 1)

  return {
    ours: moved(theirs)
    if isinstance(theirs, str)
    else dataclasses.replace(theirs, name=moved(theirs.name))
    for ours, theirs in tensors.items()
  }


QWEN3_VL = FamilySpec(
  model_type='qwen3_vl',
  architecture='Qwen3VLForConditionalGeneration',
  read_config=_read,
  write_config=_write,
  top_tensors=within_language_model(llama_style.TOP_TENSORS),
  layer_tensors=within_language_model(
    llama_style.ATTENTION_TENSORS
    | llama_style.QK_NORM_TENSORS
    | llama_style.MLP_TENSORS
  ),
  tower_tensors=TOWER_TENSORS,
  qk_norm=True,
  random_options=random_options,
)
