"""Qwen3, dense: RMS norms over each head of query and key (arXiv 2505.09388)."""

from typing import TYPE_CHECKING

from jaxrl.models.families import llama_style
from jaxrl.models.families.family_spec import ConfigFields, ConfigJson, FamilySpec
from jaxrl.options import JsonObject

if TYPE_CHECKING:
  from jaxrl.models.model_config import ModelConfig


def _read(data: ConfigJson, where: str) -> ConfigFields:
  fields = llama_style.read_settings(
    data, where, max_position=32768, num_kv_heads=32, head_dim=128
  )
  bias = bool(data.get('attention_bias', False))
  return fields | {'attention_bias': bias, 'qk_norm': True}


def _write(config: 'ModelConfig') -> JsonObject:
  return llama_style.write_settings(config) | {
    'attention_bias': config.attention_bias,
    'use_sliding_window': False,
  }


QWEN3 = FamilySpec(
  model_type='qwen3',
  architecture='Qwen3ForCausalLM',
  read_config=_read,
  write_config=_write,
  top_tensors=llama_style.TOP_TENSORS,
  layer_tensors=(
    llama_style.ATTENTION_TENSORS
    | llama_style.QK_NORM_TENSORS
    | llama_style.MLP_TENSORS
  ),
  qk_norm=True,
)
