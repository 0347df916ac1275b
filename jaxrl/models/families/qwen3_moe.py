"""Qwen3-MoE: Qwen3 with experts in its feed-forward layers (arXiv 2505.09388)."""

from typing import TYPE_CHECKING

from jaxrl.models.families import llama_style
from jaxrl.models.families.family_spec import ConfigFields, ConfigJson, FamilySpec
from jaxrl.options import JsonObject

if TYPE_CHECKING:
  from jaxrl.models.model_config import ModelConfig

_MLP = 'model.layers.{layer}.mlp.'


def _random_options(
  *,
  num_experts: int = 8,
  num_experts_per_token: int = 2,
  moe_intermediate_size: int = 128,
  norm_topk_prob: bool = True,
  tie_embeddings: bool = True,
) -> ConfigFields:
  return {
    'num_experts': num_experts,
    'num_experts_per_token': num_experts_per_token,
    'moe_intermediate_size': moe_intermediate_size,
    'norm_topk_prob': norm_topk_prob,
    'tie_embeddings': tie_embeddings,
  }


def _read(data: ConfigJson, where: str) -> ConfigFields:
  fields = llama_style.read_settings(data, where, max_position=32768, num_kv_heads=4)
  dense_layers = data.get('mlp_only_layers') or []
  sparse_step = data.get('decoder_sparse_step', 1)
  types = tuple(
    'dense' if i in dense_layers or (i + 1) % sparse_step else 'sparse'
    for i in range(data['num_hidden_layers'])
  )
  kinds = llama_style.layer_kinds(types, sparse={}, dense={'num_experts': 0})
  return (fields | (kinds if 'dense' in types else {})) | {
    'attention_bias': bool(data.get('attention_bias', False)),
    'qk_norm': True,
    # transformers 5 writes the number under another name; both mean the same.
    'num_experts': data.get('num_experts', data.get('num_local_experts', 128)),
    'num_experts_per_token': data.get('num_experts_per_tok', 8),
    'moe_intermediate_size': data.get('moe_intermediate_size', 768),
    'norm_topk_prob': bool(data.get('norm_topk_prob', False)),
  }


def _write(config: 'ModelConfig') -> JsonObject:
  return llama_style.write_settings(config) | {
    'attention_bias': config.attention_bias,
    'use_sliding_window': False,
    'num_experts': config.num_experts,
    'num_experts_per_tok': config.num_experts_per_token,
    'moe_intermediate_size': config.moe_intermediate_size,
    'norm_topk_prob': config.norm_topk_prob,
    'decoder_sparse_step': 1,
    'mlp_only_layers': [
      i for i, layer in enumerate(config.layer_configs) if not layer.num_experts
    ],
  }


QWEN3_MOE = FamilySpec(
  model_type='qwen3_moe',
  architecture='Qwen3MoeForCausalLM',
  read_config=_read,
  write_config=_write,
  top_tensors=llama_style.TOP_TENSORS,
  layer_tensors=llama_style.ATTENTION_TENSORS
  | llama_style.QK_NORM_TENSORS
  | llama_style.MLP_TENSORS
  | {
    'mlp.router.kernel': f'{_MLP}gate.weight',
    'mlp.experts.gate.kernel': f'{_MLP}experts.{{expert}}.gate_proj.weight',
    'mlp.experts.up.kernel': f'{_MLP}experts.{{expert}}.up_proj.weight',
    'mlp.experts.down.kernel': f'{_MLP}experts.{{expert}}.down_proj.weight',
  },
  qk_norm=True,
  has_experts=True,
  random_options=_random_options,
)
