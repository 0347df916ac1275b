"""GLM-4.5 to 4.7 and Air: DeepSeek-V3's experts beside grouped-query attention."""

from typing import TYPE_CHECKING

from jaxrl.models.families import deepseek_v3, llama_style
from jaxrl.models.families.family_spec import ConfigFields, ConfigJson, FamilySpec
from jaxrl.options import JsonObject

if TYPE_CHECKING:
  from jaxrl.models.model_config import ModelConfig


def _read(data: ConfigJson, where: str) -> ConfigFields:
  # `transformers` assumes a half where config.json is silent.
  settings = {'partial_rotary_factor': 0.5, **data}
  fields = llama_style.read_settings(
    settings,
    where,
    max_position=131072,
    num_kv_heads=8,
    rms_norm_eps=1e-5,
    partial_rotary=True,
  )
  experts = deepseek_v3.read_experts(
    data, where, num_experts=128, per_token=8, inner=1408
  )
  return (
    fields
    | experts
    | {
      'attention_bias': bool(data.get('attention_bias', False)),
      'qk_norm': bool(data.get('use_qk_norm', False)),
    }
  )


def _write(config: 'ModelConfig') -> JsonObject:
  return {
    **llama_style.write_settings(config),
    **deepseek_v3.write_experts(config),
    'partial_rotary_factor': config.rope_fraction,
    'attention_bias': config.attention_bias,
    'use_qk_norm': config.qk_norm,
  }


GLM4_MOE = FamilySpec(
  model_type='glm4_moe',
  architecture='Glm4MoeForCausalLM',
  read_config=_read,
  write_config=_write,
  top_tensors=llama_style.TOP_TENSORS,
  layer_tensors=llama_style.ATTENTION_TENSORS
  | llama_style.QK_NORM_TENSORS
  | deepseek_v3.EXPERT_TENSORS,
  later_layers=deepseek_v3.LATER_LAYERS,
  qk_norm=None,
  output_bias=False,
  has_experts=True,
  router_scores='sigmoid',
  random_options=deepseek_v3.expert_options,
)
