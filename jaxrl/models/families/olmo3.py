"""OLMo 3: norms after attention and MLP, and over all heads of query and key."""

from typing import TYPE_CHECKING

from jaxrl.models.families import llama_style
from jaxrl.models.families.family_spec import ConfigFields, ConfigJson, FamilySpec
from jaxrl.options import JsonObject

if TYPE_CHECKING:
  from jaxrl.models.model_config import ModelConfig


def _read(data: ConfigJson, where: str) -> ConfigFields:
  settings, local_rope = llama_style.split_rope(
    data, where, theta=500000.0, local=('', None)
  )
  fields = llama_style.read_settings(
    settings, where, max_position=2048, rms_norm_eps=1e-5, has_windows=True
  )
  every_fourth = lambda i: llama_style.LAYER_TYPES[(i + 1) % 4 != 0]  # noqa: E731
  types = llama_style.read_layer_types(data, where, every_fourth)
  local = llama_style.differing(local_rope, fields)
  local = {'window': llama_style.read_window(data, where, 4096), **local}
  kinds = {'full_attention': {}, 'sliding_attention': local}
  bias = bool(data.get('attention_bias', False))
  return (
    fields
    | {'attention_bias': bias, 'qk_norm': True}
    | llama_style.layer_kinds(types, **kinds)
  )


def _write(config: 'ModelConfig') -> JsonObject:
  return {
    **llama_style.write_settings(config),
    **llama_style.write_windows(config),
    **llama_style.write_split_rope(config),
    **llama_style.NO_PADDING,
    'attention_bias': config.attention_bias,
  }


OLMO3 = FamilySpec(
  model_type='olmo3',
  architecture='Olmo3ForCausalLM',
  read_config=_read,
  write_config=_write,
  top_tensors=llama_style.TOP_TENSORS,
  layer_tensors=llama_style.ATTENTION_TENSORS
  | llama_style.POST_NORM_TENSORS
  | llama_style.QK_NORM_TENSORS
  | llama_style.MLP_TENSORS,
  qk_norm=True,
  qk_norm_over='heads',
  norms='after',
  random_options=llama_style.windowed_options,
)
