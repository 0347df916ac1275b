"""Mistral (7B, Nemo, Small 3) and Ministral 8B, where a window may bound attention."""

from typing import TYPE_CHECKING

from jaxrl.models.families import llama_style
from jaxrl.models.families.family_spec import ConfigFields, ConfigJson, FamilySpec
from jaxrl.options import JsonObject

if TYPE_CHECKING:
  from jaxrl.models.model_config import ModelConfig


def _read(data: ConfigJson, where: str) -> ConfigFields:
  fields = llama_style.read_settings(
    data, where, max_position=4096 * 32, num_kv_heads=8, has_windows=True
  )
  if data.get('layer_types') is not None:
    raise ValueError(
      f"{where}: layer_types is not supported in a model of model_type 'mistral', "
      "whose layers are all alike; that of layers which differ is 'ministral'"
    )
  window = llama_style.read_window(data, where, 4096)
  return fields | {'attention_bias': False, 'qk_norm': False, 'window': window}


def _write(config: 'ModelConfig') -> JsonObject:
  return llama_style.write_settings(config) | {'sliding_window': config.window or None}


def _read_ministral(data: ConfigJson, where: str) -> ConfigFields:
  fields = llama_style.read_settings(
    data, where, max_position=4096 * 32, num_kv_heads=8, has_windows=True
  )
  window = llama_style.read_window(data, where, 4096)
  name = 'sliding_attention' if window else 'full_attention'
  types = llama_style.read_layer_types(data, where, lambda _: name)
  kinds = {'full_attention': {}, 'sliding_attention': {'window': window}}
  return (
    fields
    | {'attention_bias': False, 'qk_norm': False}
    | llama_style.layer_kinds(types, **kinds)
  )


def _write_ministral(config: 'ModelConfig') -> JsonObject:
  return llama_style.write_settings(config) | llama_style.write_windows(config)


def _random_options(*, window: int = 0, tie_embeddings: bool = True) -> ConfigFields:
  return {'window': window, 'tie_embeddings': tie_embeddings}


MISTRAL = FamilySpec(
  model_type='mistral',
  architecture='MistralForCausalLM',
  read_config=_read,
  write_config=_write,
  top_tensors=llama_style.TOP_TENSORS,
  layer_tensors=llama_style.ATTENTION_TENSORS | llama_style.MLP_TENSORS,
  attention_bias=False,
  random_options=_random_options,
)
MINISTRAL = FamilySpec(
  model_type='ministral',
  architecture='MinistralForCausalLM',
  read_config=_read_ministral,
  write_config=_write_ministral,
  top_tensors=llama_style.TOP_TENSORS,
  layer_tensors=llama_style.ATTENTION_TENSORS | llama_style.MLP_TENSORS,
  attention_bias=False,
  random_options=llama_style.windowed_options,
)
