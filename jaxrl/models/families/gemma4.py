"""Gemma 4 (text): inputs of each layer's own, shared keys, experts beside an MLP."""

from typing import TYPE_CHECKING

from jaxrl.models.families import gemma, llama_style
from jaxrl.models.families.family_spec import ConfigFields, ConfigJson, FamilySpec
from jaxrl.options import JsonObject

if TYPE_CHECKING:
  from jaxrl.models.model_config import ModelConfig

_LAYER = 'model.layers.{layer}.'
# Field of ModelConfig → key in config.json.
_EXPERTS = {
  'num_experts': 'num_experts',
  'num_experts_per_token': 'top_k_experts',
  'moe_intermediate_size': 'moe_intermediate_size',
}
_ROPE = {  # what `transformers` assumes where config.json has no rotary settings
  'sliding_attention': {'rope_type': 'default', 'rope_theta': 10000.0},
  'full_attention': {
    'rope_type': 'proportional',
    'partial_rotary_factor': 0.25,
    'rope_theta': 1000000.0,
  },
}


def _read(data: ConfigJson, where: str) -> ConfigFields:
  attention = data.get('use_bidirectional_attention')
  if attention and attention != 'vision':  # which text alone does not show
    raise ValueError(
      f'{where}: use_bidirectional_attention={attention!r} is not supported'
    )
  settings, local_rope = llama_style.split_rope(
    {'rope_parameters': _ROPE, **data}, where, theta=1e6, local=('', 10000.0)
  )
  fields = llama_style.read_settings(
    settings,
    where,
    max_position=131072,
    num_kv_heads=4,
    head_dim=256,
    tie_embeddings=True,
    activation=gemma.ACTIVATION,
    has_windows=True,
  )
  width = data.get('hidden_size_per_layer_input', 256) or 0
  if width and data.get('vocab_size_per_layer_input', 262144) != fields['vocab_size']:
    raise ValueError(
      f'{where}: vocab_size_per_layer_input={data.get("vocab_size_per_layer_input")} '
      f'is not supported, only vocab_size={fields["vocab_size"]}'
    )
  window = llama_style.read_window(data, where, 512)
  full = {**_read_full(data, where), 'keys_are_values': _keys_are_values(data)}
  usual = fields | {'keys_are_values': False}
  kind_fields = {
    'full': llama_style.differing(full, usual),
    'sliding': {'window': window, **llama_style.differing(local_rope, fields)},
  }
  wide = bool(data.get('use_double_wide_mlp')) * fields['intermediate_size']
  return {
    **fields,
    **_read_experts(data, where),
    **_read_kinds(data, where, kind_fields, wide + fields['intermediate_size']),
    'attention_bias': bool(data.get('attention_bias', False)),
    'qk_norm': True,
    'query_scale': 1.0,
    'logits_softcap': float(data.get('final_logit_softcapping') or 0.0),
    'per_layer_width': width,
  }


def _read_experts(data: ConfigJson, where: str) -> ConfigFields:
  """Reads the sizes of the experts; {} if there are none."""
  if not data.get('enable_moe_block'):
    return {}
  missing = [key for key in _EXPERTS.values() if not isinstance(data.get(key), int)]
  if missing:
    raise ValueError(
      f'{where}: enable_moe_block=True needs {", ".join(missing)} as whole numbers'
    )
  return {ours: data[theirs] for ours, theirs in _EXPERTS.items()}


def _keys_are_values(data: ConfigJson) -> bool:
  return bool(data.get('attention_k_eq_v', False))


def _read_full(data: ConfigJson, where: str) -> ConfigFields:
  """Reads the sizes of layers with full attention."""
  full = {'head_dim': data.get('global_head_dim', 512)}
  if _keys_are_values(data) and data.get('num_global_key_value_heads') is not None:
    full['num_key_value_heads'] = data['num_global_key_value_heads']
  if data.get('per_layer_config') is not None:  # which says all that differs
    full = {}
  overrides = list((data.get('per_layer_config') or {}).values()) or [full]
  names = {'head_dim': 'head_dim', 'num_key_value_heads': 'num_kv_heads'}
  if any(one != overrides[0] or set(one) - set(names) for one in overrides):
    raise ValueError(
      f'{where}: per_layer_config may only say one head_dim and num_key_value_heads '
      'for all layers with full attention'
    )
  return {names[name]: value for name, value in overrides[0].items()}


def _read_kinds(
  data: ConfigJson, where: str, kind_fields: dict[str, ConfigFields], wide: int
) -> ConfigFields:
  """Reads layer kinds; 'shared' layers read the keys of a 'source' layer."""
  fifth = lambda i: llama_style.LAYER_TYPES[(i + 1) % 6 != 0]  # noqa: E731
  types = [
    name.split('_')[0] for name in llama_style.read_layer_types(data, where, fifth)
  ]
  types[-1] = 'full'  # as `transformers` has it
  first = len(types) - data.get('num_kv_shared_layers', 0)
  kinds = {f'{name}_attention': fields for name, fields in kind_fields.items()}
  names = [f'{name}_attention' for name in types]
  for i in range(first, len(types)):
    name = types[i]
    if name not in types[:first]:
      raise ValueError(
        f'{where}: num_kv_shared_layers leaves no {name}_attention layer'
      )
    source = first - 1 - types[:first][::-1].index(name)
    names[source], names[i] = f'{name}_source', f'{name}_shared'
    kinds[f'{name}_source'] = kind_fields[name] | {'kv_is_read': True}
    kinds[f'{name}_shared'] = kind_fields[name] | {'kv_layer': source}
    if wide:
      kinds[f'{name}_shared'] |= {'intermediate_size': wide}
  return llama_style.layer_kinds(tuple(names), **kinds)


def _write(config: 'ModelConfig') -> JsonObject:
  written = llama_style.write_settings(config) | llama_style.write_windows(config)
  for name in ('hidden_act', 'rope_theta', 'rope_scaling'):
    del written[name]
  kinds = [name.split('_')[0] for name in config.layer_types]
  layers = dict(zip(kinds, config.layer_configs, strict=True))
  full, shared = layers['full'], [c for c in config.layer_configs if c.kv_layer >= 0]
  rope = {
    f'{kind}_attention': {
      **dict(layer.rope_scaling or {'rope_type': 'default'}),
      'rope_theta': layer.rope_theta,
    }
    for kind, layer in layers.items()
  }
  return {
    **written,
    'layer_types': [f'{kind}_attention' for kind in kinds],
    'rope_parameters': _ROPE | rope,
    'hidden_activation': gemma.ACTIVATION[1],
    'attention_bias': config.attention_bias,
    'attention_k_eq_v': full.keys_are_values,
    'global_head_dim': full.head_dim,
    'num_global_key_value_heads': full.num_kv_heads if full.keys_are_values else None,
    'num_kv_shared_layers': len(shared),
    'use_double_wide_mlp': any(
      layer.intermediate_size > config.intermediate_size for layer in shared
    ),
    'final_logit_softcapping': config.logits_softcap or None,
    'hidden_size_per_layer_input': config.per_layer_width,
    'vocab_size_per_layer_input': config.vocab_size,
    'enable_moe_block': bool(config.num_experts),
    **{theirs: getattr(config, ours) or None for ours, theirs in _EXPERTS.items()},
  }


def _random_options(
  *, window: int = 64, per_layer_width: int = 16, tie_embeddings: bool = True
) -> ConfigFields:
  fields = llama_style.windowed_options(window=window, tie_embeddings=tie_embeddings)
  return {**fields, 'query_scale': 1.0, 'per_layer_width': per_layer_width}


GEMMA4 = FamilySpec(
  model_type='gemma4_text',
  architecture='Gemma4ForCausalLM',
  read_config=_read,
  write_config=_write,
  top_tensors=llama_style.TOP_TENSORS
  | {
    'per_layer_embedding.table': 'model.embed_tokens_per_layer.weight',
    'per_layer_projection.kernel': 'model.per_layer_model_projection.weight',
    'per_layer_norm.scale': 'model.per_layer_projection_norm.weight',
  },
  layer_tensors=gemma.TENSORS
  | llama_style.QK_NORM_TENSORS
  | {
    'per_layer_gate.kernel': f'{_LAYER}per_layer_input_gate.weight',
    'per_layer_out.kernel': f'{_LAYER}per_layer_projection.weight',
    'per_layer_norm.scale': f'{_LAYER}post_per_layer_input_norm.weight',
    'output_scale': f'{_LAYER}layer_scalar',
  }
  | {
    'mlp.dense_norm.scale': f'{_LAYER}pre_feedforward_layernorm.weight',
    'mlp.dense.gate.kernel': f'{_LAYER}mlp.gate_proj.weight',
    'mlp.dense.up.kernel': f'{_LAYER}mlp.up_proj.weight',
    'mlp.dense.down.kernel': f'{_LAYER}mlp.down_proj.weight',
    'mlp.dense_post_norm.scale': f'{_LAYER}post_feedforward_layernorm_1.weight',
    'mlp.norm.scale': f'{_LAYER}pre_feedforward_layernorm_2.weight',
    'mlp.post_norm.scale': f'{_LAYER}post_feedforward_layernorm_2.weight',
    'mlp.router_norm.scale': f'{_LAYER}router.scale',
    'mlp.expert_scale': f'{_LAYER}router.per_expert_scale',
    'mlp.router.kernel': f'{_LAYER}router.proj.weight',
    'mlp.experts.gate.kernel': f'{_LAYER}experts.gate_up_proj',
    'mlp.experts.up.kernel': f'{_LAYER}experts.gate_up_proj',
    'mlp.experts.down.kernel': f'{_LAYER}experts.down_proj',
  },
  qk_norm=True,
  v_norm=True,
  norms='both',
  scales_embeddings=True,
  scales_layers=True,
  activation='gelu_tanh',
  gating='gelu_tanh',
  has_experts=None,
  experts_beside_mlp=True,
  skipped_tensors={
    r'model\.layers\.\d+\.self_attn\.([kv]_proj|k_norm)\.weight': (
      'layers that read the keys and values of another'
    ),
  },
  random_options=_random_options,
)
