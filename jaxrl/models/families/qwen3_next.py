"""Qwen3-Next and Qwen3.5 (text): gated DeltaNet layers and gated attention."""

import functools
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
_LINEAR, _MLP = f'{_LAYER}linear_attn.', f'{_LAYER}mlp.'
LAYER_TYPES = ('linear_attention', 'full_attention')
DENSE = '_dense'  # ends the kind of a layer without experts
# Field of ModelConfig → key in config.json, and what `transformers` assumes.
_LINEAR_SIZES = {
  'linear_key_heads': ('linear_num_key_heads', 16),
  'linear_value_heads': ('linear_num_value_heads', 32),
  'linear_key_dim': ('linear_key_head_dim', 128),
  'linear_value_dim': ('linear_value_head_dim', 128),
  'conv_width': ('linear_conv_kernel_dim', 4),
}
# Settings of published checkpoints, of which only this value is supported.
_FIXED = {
  'attn_output_gate': True,
  'mamba_ssm_dtype': 'float32',
  'use_sliding_window': False,
}
_MROPE = ('mrope_section', 'mrope_interleaved')  # of images; text has one position


def _read(
  data: ConfigJson,
  where: str,
  *,
  num_kv_heads: int,
  experts: tuple[int, int] = (0, 0),
) -> ConfigFields:
  """Reads config.json.

  `experts` holds its defaults: the number of experts, and the number per token.
  """
  for name, value in _FIXED.items():
    if data.get(name, value) not in (value, None):
      raise ValueError(
        f'{where}: {name}={data[name]!r} is not supported, only {value!r}'
      )
  settings = dict(data)
  settings.setdefault('partial_rotary_factor', 0.25)
  for key in ('rope_parameters', 'rope_scaling'):
    rope = data.get(key) or {}
    settings[key] = {n: value for n, value in rope.items() if n not in _MROPE}
  fields = llama_style.read_settings(
    settings,
    where,
    max_position=32768,
    num_kv_heads=num_kv_heads,
    head_dim=256,
    partial_rotary=True,
    has_windows=True,
  )
  fields |= {'attention_bias': bool(data.get('attention_bias')), 'qk_norm': True}
  for field, (key, default) in _LINEAR_SIZES.items():
    fields[field] = data.get(key, default)
  if experts[0]:
    number = data.get('num_experts', data.get('num_local_experts', experts[0]))
    fields |= {
      'num_experts': number,
      'num_experts_per_token': data.get('num_experts_per_tok', experts[1]),
      'moe_intermediate_size': data.get('moe_intermediate_size', 512),
      'shared_expert_size': data.get('shared_expert_intermediate_size', 512),
      'norm_topk_prob': bool(data.get('norm_topk_prob', True)),
    }
  interval = data.get('full_attention_interval', 4)
  default = lambda i: LAYER_TYPES[(i + 1) % interval == 0]  # noqa: E731
  types = llama_style.read_layer_types(data, where, default, known=LAYER_TYPES)
  return fields | _kinds(types)


def _kinds(types: tuple[str, ...]) -> ConfigFields:
  """Returns the config fields for layers of the kinds `types`."""
  linear = {'linear_attention': True, 'use_rope': False}
  dense = {'num_experts': 0, 'shared_expert_size': 0}
  kinds = {
    'linear_attention': linear,
    'full_attention': {},
    f'linear_attention{DENSE}': linear | dense,
    f'full_attention{DENSE}': dense,
  }
  return llama_style.layer_kinds(types, **kinds)


def _read_next(data: ConfigJson, where: str) -> ConfigFields:
  fields = _read(data, where, num_kv_heads=2, experts=(512, 10))
  dense_layers = data.get('mlp_only_layers') or []
  sparse_step = data.get('decoder_sparse_step', 1)
  types = (
    f'{kind}{DENSE}' if i in dense_layers or (i + 1) % sparse_step else kind
    for i, kind in enumerate(fields['layer_types'])
  )
  return fields | _kinds(tuple(types))


def _write(config: 'ModelConfig') -> JsonObject:
  settings = llama_style.write_settings(config) | {
    'partial_rotary_factor': config.rope_fraction,
    'attention_bias': config.attention_bias,
    'layer_types': [name.removesuffix(DENSE) for name in config.layer_types],
  }
  for field, (key, _) in _LINEAR_SIZES.items():
    settings[key] = getattr(config, field)
  if config.num_experts:
    settings |= {
      'num_experts': config.num_experts,
      'num_experts_per_tok': config.num_experts_per_token,
      'moe_intermediate_size': config.moe_intermediate_size,
      'shared_expert_intermediate_size': config.shared_expert_size,
    }
  return settings


def _write_next(config: 'ModelConfig') -> JsonObject:
  dense = (i for i, kind in enumerate(config.layer_types) if kind.endswith(DENSE))
  return _write(config) | {
    'norm_topk_prob': config.norm_topk_prob,
    'decoder_sparse_step': 1,
    'mlp_only_layers': list(dense),
  }


def _write_moe(config: 'ModelConfig') -> JsonObject:
  settings = _write(config)
  del settings['intermediate_size']  # no layer is dense
  return settings


def _read_moe(data: ConfigJson, where: str) -> ConfigFields:
  if not data.get('norm_topk_prob', True):
    raise ValueError(f'{where}: norm_topk_prob=False is not supported, only True')
  width = data.get('moe_intermediate_size', 512)  # no layer is dense
  data = {**data, 'intermediate_size': width}
  return _read(data, where, num_kv_heads=2, experts=(256, 8))


def _random_options(
  *,
  linear_key_heads: int = 2,
  linear_value_heads: int = 4,
  linear_key_dim: int = 32,
  linear_value_dim: int = 32,
  conv_width: int = 4,
  rope_fraction: float = 0.25,
  tie_embeddings: bool = True,
) -> ConfigFields:
  return {
    'linear_key_heads': linear_key_heads,
    'linear_value_heads': linear_value_heads,
    'linear_key_dim': linear_key_dim,
    'linear_value_dim': linear_value_dim,
    'conv_width': conv_width,
    'rope_fraction': rope_fraction,
    'tie_embeddings': tie_embeddings,
    **_kinds((LAYER_TYPES[0],) * 3 + LAYER_TYPES[1:]),
  }


def _random_moe_options(
  *,
  num_experts: int = 8,
  num_experts_per_token: int = 2,
  moe_intermediate_size: int = 128,
  shared_expert_size: int = 128,
  linear_key_heads: int = 2,
  linear_value_heads: int = 4,
  linear_key_dim: int = 32,
  linear_value_dim: int = 32,
  conv_width: int = 4,
  rope_fraction: float = 0.25,
  tie_embeddings: bool = True,
) -> ConfigFields:
  return {
    'num_experts': num_experts,
    'num_experts_per_token': num_experts_per_token,
    'moe_intermediate_size': moe_intermediate_size,
    'shared_expert_size': shared_expert_size,
    **_random_options(
      linear_key_heads=linear_key_heads,
      linear_value_heads=linear_value_heads,
      linear_key_dim=linear_key_dim,
      linear_value_dim=linear_value_dim,
      conv_width=conv_width,
      rope_fraction=rope_fraction,
      tie_embeddings=tie_embeddings,
    ),
  }


_CONV = StoredAs(f'{_LINEAR}conv1d.weight', depthwise=True)
_QUERY_GATE = StoredAs(f'{_LAYER}self_attn.q_proj.weight', turns='num_heads')
_QUERY_GATE_BIAS = StoredAs(f'{_LAYER}self_attn.q_proj.bias', turns='num_heads')
# Projections of Qwen3-Next take turns, those of one key head after those of another.
_QKVZ = StoredAs(f'{_LINEAR}in_proj_qkvz.weight', turns='linear_key_heads')
_BA = StoredAs(f'{_LINEAR}in_proj_ba.weight', turns='linear_key_heads')
_TENSORS = (
  llama_style.ATTENTION_TENSORS
  | llama_style.QK_NORM_TENSORS
  | llama_style.MLP_TENSORS
  | {
    'attention.q.kernel': _QUERY_GATE,
    'attention.q.bias': _QUERY_GATE_BIAS,
    'attention.output_gate.kernel': _QUERY_GATE,
    'attention.output_gate.bias': _QUERY_GATE_BIAS,
    'delta.q_conv': _CONV,
    'delta.k_conv': _CONV,
    'delta.v_conv': _CONV,
    'delta.a_log': f'{_LINEAR}A_log',
    'delta.dt_bias': f'{_LINEAR}dt_bias',
    'delta.norm.scale': f'{_LINEAR}norm.weight',
    'delta.o.kernel': f'{_LINEAR}out_proj.weight',
  }
)
_NEXT_TENSORS = {
  'delta.q.kernel': _QKVZ,
  'delta.k.kernel': _QKVZ,
  'delta.v.kernel': _QKVZ,
  'delta.output_gate.kernel': _QKVZ,
  'delta.beta.kernel': _BA,
  'delta.decay.kernel': _BA,
}
_QWEN3_5_TENSORS = {
  **{f'delta.{name}.kernel': f'{_LINEAR}in_proj_qkv.weight' for name in 'qkv'},
  'delta.output_gate.kernel': f'{_LINEAR}in_proj_z.weight',
  'delta.beta.kernel': f'{_LINEAR}in_proj_b.weight',
  'delta.decay.kernel': f'{_LINEAR}in_proj_a.weight',
}
_EXPERT_TENSORS = {
  'mlp.router.kernel': f'{_MLP}gate.weight',
  **{
    f'mlp.experts.{name}.kernel': f'{_MLP}experts.{{expert}}.{name}_proj.weight'
    for name in ('gate', 'up', 'down')
  },
  **{
    f'mlp.shared.{name}.kernel': f'{_MLP}shared_expert.{name}_proj.weight'
    for name in ('gate', 'up', 'down')
  },
  'mlp.shared_gate.kernel': f'{_MLP}shared_expert_gate.weight',
}
_make_spec = functools.partial(
  FamilySpec,
  top_tensors=llama_style.TOP_TENSORS,
  qk_norm=True,
  zero_centred_norms=True,
  gates_attention=True,
  skipped_tensors={
    r'mtp\..*': 'the multi-token-prediction head',
    r'model\.visual\..*': 'the vision tower',
  },
)
QWEN3_NEXT = _make_spec(
  model_type='qwen3_next',
  architecture='Qwen3NextForCausalLM',
  read_config=_read_next,
  write_config=_write_next,
  layer_tensors=_TENSORS | _NEXT_TENSORS | _EXPERT_TENSORS,
  has_experts=True,
  gates_shared_expert=True,
  random_options=_random_moe_options,
)
QWEN3_5 = _make_spec(
  model_type='qwen3_5_text',
  architecture='Qwen3_5ForCausalLM',
  read_config=functools.partial(_read, num_kv_heads=4),
  write_config=_write,
  layer_tensors=_TENSORS | _QWEN3_5_TENSORS,
  random_options=_random_options,
)
QWEN3_5_MOE = _make_spec(
  model_type='qwen3_5_moe_text',
  architecture='Qwen3_5MoeForCausalLM',
  read_config=_read_moe,
  write_config=_write_moe,
  layer_tensors=_TENSORS | _QWEN3_5_TENSORS | _EXPERT_TENSORS,
  has_experts=True,
  gates_shared_expert=True,
  random_options=_random_moe_options,
)
