"""SmolLM3, in which every fourth layer has no rotary positions (arXiv 2501.18795)."""

from typing import TYPE_CHECKING

from jaxrl.models.families import llama_style
from jaxrl.models.families.family_spec import ConfigFields, ConfigJson, FamilySpec
from jaxrl.options import JsonObject

if TYPE_CHECKING:
  from jaxrl.models.model_config import ModelConfig


_ROTARY, _BARE = 'rotary', 'no_rope'  # our names of its kinds of layers
_INTERVAL = 4


def _read(data: ConfigJson, where: str) -> ConfigFields:
  fields = llama_style.read_settings(
    data,
    where,
    max_position=32768,
    num_kv_heads=4,
    rope_theta=2e6,
    tie_embeddings=True,
  )
  number = data['num_hidden_layers']
  every = data.get('no_rope_layer_interval', _INTERVAL)
  rotary = data.get('no_rope_layers')
  if rotary is None:
    rotary = [(i + 1) % every != 0 for i in range(number)]
  if len(rotary) < number:
    raise ValueError(
      f'{where}: no_rope_layers names {len(rotary)} layers, not '
      f'num_hidden_layers={number}'
    )
  types = tuple(_ROTARY if has else _BARE for has in rotary[:number])
  kinds = llama_style.layer_kinds(types, **{_ROTARY: {}, _BARE: {'use_rope': False}})
  bias = bool(data.get('attention_bias', False))
  return fields | {'attention_bias': bias, 'qk_norm': False} | kinds


def _write(config: 'ModelConfig') -> JsonObject:
  return llama_style.write_settings(config) | {
    'attention_bias': config.attention_bias,
    'use_sliding_window': False,
    'no_rope_layers': [int(layer.use_rope) for layer in config.layer_configs],
    'no_rope_layer_interval': _INTERVAL,
    **llama_style.NO_PADDING,
  }


def _random_options(*, tie_embeddings: bool = True) -> ConfigFields:
  types = (*(_ROTARY,) * (_INTERVAL - 1), _BARE)
  kinds = llama_style.layer_kinds(types, **{_ROTARY: {}, _BARE: {'use_rope': False}})
  return {'tie_embeddings': tie_embeddings, **kinds}


SMOLLM3 = FamilySpec(
  model_type='smollm3',
  architecture='SmolLM3ForCausalLM',
  read_config=_read,
  write_config=_write,
  top_tensors=llama_style.TOP_TENSORS,
  layer_tensors=llama_style.ATTENTION_TENSORS | llama_style.MLP_TENSORS,
  random_options=_random_options,
)
