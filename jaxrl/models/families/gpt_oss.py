"""GPT-OSS: sinks, alternating windows, experts with biases (arXiv 2508.10925)."""

from typing import TYPE_CHECKING

from jaxrl.models.families import llama_style
from jaxrl.models.families.family_spec import (
  ConfigFields,
  ConfigJson,
  FamilySpec,
  StoredAs,
)
from jaxrl.options import JsonObject

if TYPE_CHECKING:
  from jaxrl.models.model_config import ModelConfig

_LAYER = 'model.layers.{layer}.'
_EXPERTS = f'{_LAYER}mlp.experts.'
_TURNS = 'moe_intermediate_size'
_GATE_UP = StoredAs(f'{_EXPERTS}gate_up_proj', transposed=False, turns=_TURNS)
_GATE_UP_BIAS = StoredAs(f'{_EXPERTS}gate_up_proj_bias', turns=_TURNS)
_ROPE = {  # what `transformers` assumes where config.json has no rotary settings
  'rope_type': 'yarn',
  'factor': 32.0,
  'beta_fast': 32.0,
  'beta_slow': 1.0,
  'truncate': False,
  'original_max_position_embeddings': 4096,
}
_LIMIT = 7.0  # of `kernels.experts.GATINGS`


def _read(data: ConfigJson, where: str) -> ConfigFields:
  settings = dict(data)
  if not (data.get('rope_parameters') or data.get('rope_scaling')):
    settings['rope_scaling'] = _ROPE
  if (data.get('quantization_config') or {}).get('quant_method') == 'mxfp4':
    del settings['quantization_config']
  if data.get('swiglu_limit', _LIMIT) != _LIMIT:
    raise ValueError(
      f'{where}: swiglu_limit={data["swiglu_limit"]} is not supported, only {_LIMIT}'
    )
  fields = llama_style.read_settings(
    settings,
    where,
    max_position=131072,
    num_kv_heads=8,
    head_dim=64,
    rope_theta=150000.0,
    rms_norm_eps=1e-5,
    has_windows=True,
  )
  alternating = lambda i: llama_style.LAYER_TYPES[(i + 1) % 2]  # noqa: E731
  types = llama_style.read_layer_types(data, where, alternating)
  window = llama_style.read_window(data, where, 128)
  kinds = {'full_attention': {}, 'sliding_attention': {'window': window}}
  return {
    **fields,
    **llama_style.layer_kinds(types, **kinds),
    'attention_bias': bool(data.get('attention_bias', True)),
    'qk_norm': False,
    'num_experts': data.get('num_local_experts', data.get('num_experts', 128)),
    'num_experts_per_token': data.get('num_experts_per_tok', 4),
    'moe_intermediate_size': fields['intermediate_size'],
    'norm_topk_prob': True,
  }


def _write(config: 'ModelConfig') -> JsonObject:
  rope = dict(config.rope_scaling or {'rope_type': 'default'})
  return {
    **llama_style.write_settings(config),
    **llama_style.write_windows(config),
    # Without any, YaRN would be assumed.
    'rope_parameters': {**rope, 'rope_theta': config.rope_theta},
    'attention_bias': config.attention_bias,
    'intermediate_size': config.moe_intermediate_size,
    'num_local_experts': config.num_experts,
    'num_experts_per_tok': config.num_experts_per_token,
    'swiglu_limit': _LIMIT,
  }


def _random_options(
  *,
  num_experts: int = 8,
  num_experts_per_token: int = 2,
  moe_intermediate_size: int = 128,
  window: int = 64,
  tie_embeddings: bool = False,
) -> ConfigFields:
  kinds = {'full_attention': {}, 'sliding_attention': {'window': window}}
  return {
    'attention_bias': True,
    'num_experts': num_experts,
    'num_experts_per_token': num_experts_per_token,
    'moe_intermediate_size': moe_intermediate_size,
    'tie_embeddings': tie_embeddings,
    **llama_style.layer_kinds(llama_style.LAYER_TYPES[::-1], **kinds),
  }


GPT_OSS = FamilySpec(
  model_type='gpt_oss',
  architecture='GptOssForCausalLM',
  read_config=_read,
  write_config=_write,
  top_tensors=llama_style.TOP_TENSORS,
  layer_tensors=llama_style.ATTENTION_TENSORS
  | {
    'attention.sinks': f'{_LAYER}self_attn.sinks',
    'mlp.router.kernel': f'{_LAYER}mlp.router.weight',
    'mlp.router.bias': f'{_LAYER}mlp.router.bias',
    'mlp.experts.gate.kernel': _GATE_UP,
    'mlp.experts.gate.bias': _GATE_UP_BIAS,
    'mlp.experts.up.kernel': _GATE_UP,
    'mlp.experts.up.bias': _GATE_UP_BIAS,
    'mlp.experts.down.kernel': StoredAs(f'{_EXPERTS}down_proj', transposed=False),
    'mlp.experts.down.bias': f'{_EXPERTS}down_proj_bias',
  },
  has_experts=True,
  expert_biases=True,
  gating='clamped',
  sinks=True,
  random_options=_random_options,
)
