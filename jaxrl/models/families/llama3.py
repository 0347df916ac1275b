"""Llama 3 (and 2): no norms on query and key, biases only where config.json says so."""

from typing import TYPE_CHECKING

from jaxrl.models.families import llama_style
from jaxrl.models.families.family_spec import ConfigFields, ConfigJson, FamilySpec
from jaxrl.options import JsonObject

if TYPE_CHECKING:
  from jaxrl.models.model_config import ModelConfig


def _read(data: ConfigJson, where: str) -> ConfigFields:
  fields = llama_style.read_settings(data, where, max_position=2048)
  bias = bool(data.get('attention_bias', False))
  return fields | {'attention_bias': bias, 'qk_norm': False}


def _write(config: 'ModelConfig') -> JsonObject:
  return llama_style.write_settings(config) | {'attention_bias': config.attention_bias}


LLAMA3 = FamilySpec(
  model_type='llama',
  architecture='LlamaForCausalLM',
  read_config=_read,
  write_config=_write,
  top_tensors=llama_style.TOP_TENSORS,
  layer_tensors=llama_style.ATTENTION_TENSORS | llama_style.MLP_TENSORS,
)
