"""Qwen2 and Qwen2.5: biases on query, key and value, none on the attention's output."""

from typing import TYPE_CHECKING

from jaxrl.models.families import llama_style
from jaxrl.models.families.family_spec import ConfigFields, ConfigJson, FamilySpec
from jaxrl.options import JsonObject

if TYPE_CHECKING:
  from jaxrl.models.model_config import ModelConfig


def _read(data: ConfigJson, where: str) -> ConfigFields:
  fields = llama_style.read_settings(data, where, max_position=32768, num_kv_heads=32)
  return fields | {'attention_bias': True, 'qk_norm': False}


def _write(config: 'ModelConfig') -> JsonObject:
  return llama_style.write_settings(config) | {'use_sliding_window': False}


QWEN2 = FamilySpec(
  model_type='qwen2',
  architecture='Qwen2ForCausalLM',
  read_config=_read,
  write_config=_write,
  top_tensors=llama_style.TOP_TENSORS,
  layer_tensors=llama_style.ATTENTION_TENSORS | llama_style.MLP_TENSORS,
  attention_bias=True,
  output_bias=False,
)
