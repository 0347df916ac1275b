"""GLM-4.7-Flash: DeepSeek-V3's latent attention and experts, of another size."""

from typing import TYPE_CHECKING

from jaxrl.models.families import deepseek_v3, llama_style
from jaxrl.models.families.family_spec import ConfigFields, ConfigJson, FamilySpec
from jaxrl.options import JsonObject

if TYPE_CHECKING:
  from jaxrl.models.model_config import ModelConfig


def _read(data: ConfigJson, where: str) -> ConfigFields:
  latents = deepseek_v3.read_latents(
    data,
    where,
    q_latent=768,
    plain=192,
    value_dim=256,
    max_position=202752,
    rms_norm_eps=1e-5,
  )
  experts = deepseek_v3.read_experts(
    data, where, num_experts=64, per_token=4, inner=1536, scaling=1.8
  )
  return latents | experts


def _write(config: 'ModelConfig') -> JsonObject:
  types = ['sparse' if layer.num_experts else 'dense' for layer in config.layer_configs]
  written = deepseek_v3.write_latents(config) | deepseek_v3.write_experts(config)
  return written | {'mlp_layer_types': types}


GLM4_MOE_LITE = FamilySpec(
  model_type='glm4_moe_lite',
  architecture='Glm4MoeLiteForCausalLM',
  read_config=_read,
  write_config=_write,
  top_tensors=llama_style.TOP_TENSORS,
  layer_tensors=deepseek_v3.LATENT_TENSORS | deepseek_v3.EXPERT_TENSORS,
  later_layers=deepseek_v3.LATER_LAYERS,
  has_experts=True,
  router_scores='sigmoid',
  random_options=deepseek_v3.latent_options,
)
