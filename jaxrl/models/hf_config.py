"""Translates Hugging Face's config.json to a ModelConfig and back.

A setting that would change the forward pass and is not supported is an error; one the
family's forward pass never reads is metadata, and left alone.
"""

from collections.abc import Mapping
from typing import Any

from jaxrl.models import rope
from jaxrl.models.config import FAMILIES, ModelConfig

ARCHITECTURES = {
  'qwen2': 'Qwen2ForCausalLM',
  'qwen3': 'Qwen3ForCausalLM',
  'qwen3_moe': 'Qwen3MoeForCausalLM',
  'llama': 'LlamaForCausalLM',
}
SIZES = {
  'vocab_size': 'vocab_size',
  'hidden_size': 'hidden_size',
  'num_layers': 'num_hidden_layers',
  'num_heads': 'num_attention_heads',
  'intermediate_size': 'intermediate_size',
}
# What transformers assumes of a family when its config.json is silent.
MAX_POSITION = {'qwen2': 32768, 'qwen3': 32768, 'qwen3_moe': 32768, 'llama': 2048}
KV_HEADS = {'qwen2': 32, 'qwen3': 32, 'qwen3_moe': 4}
HEAD_DIM = {'qwen3': 128}
ROPE_THETA = 10000.0
# The only value supported of each setting.
FIXED = {
  'hidden_act': 'silu',
  'attention_dropout': 0.0,
  'mlp_bias': False,
  'partial_rotary_factor': 1.0,
  'quantization_config': None,
}


def from_hf(data: Mapping[str, Any], *, where: str = 'config.json') -> ModelConfig:
  """Reads a config.json's contents; `where` names it in errors (ValueError)."""
  family = data.get('model_type')
  if family not in FAMILIES:
    raise ValueError(
      f'{where}: model_type {family!r} is not supported; '
      f'these are: {", ".join(FAMILIES)}'
    )
  missing = [name for name in SIZES.values() if not isinstance(data.get(name), int)]
  if missing:
    raise ValueError(f'{where}: {", ".join(missing)} must be given as whole numbers')
  for name, value in FIXED.items():
    if data.get(name, value) not in (value, None):
      raise ValueError(
        f'{where}: {name}={data[name]!r} is not supported, only {value!r}'
      )
  _refuse_sliding_window(data, where)
  theta, scaling = _rope(data, where)
  sizes: dict[str, Any] = {ours: data[theirs] for ours, theirs in SIZES.items()}
  heads: int = sizes['num_heads']
  width: int = sizes['hidden_size']
  per_head = HEAD_DIM.get(family, width // heads)
  kv_heads = KV_HEADS.get(family, heads)
  try:
    return ModelConfig(
      **sizes,
      num_kv_heads=data.get('num_key_value_heads') or kv_heads,
      head_dim=data.get('head_dim') or per_head,
      family=family,
      rope_theta=theta,
      rope_scaling=scaling,
      rms_norm_eps=data.get('rms_norm_eps', 1e-6),
      max_position=data.get('max_position_embeddings', MAX_POSITION[family]),
      tie_embeddings=data.get('tie_word_embeddings', False),
      attention_bias=family == 'qwen2' or bool(data.get('attention_bias', False)),
      qk_norm=family in ('qwen3', 'qwen3_moe'),
      **_experts(data, where),
    )
  except ValueError as error:
    raise ValueError(f'{where}: {error}') from error


def to_hf(config: ModelConfig, dtype: str) -> dict[str, Any]:
  """The contents of a config.json that `transformers` and vLLM read alike."""
  data = {
    'architectures': [ARCHITECTURES[config.family]],
    'model_type': config.family,
    **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
    'num_key_value_heads': config.num_kv_heads,
    'head_dim': config.head_dim,
    'hidden_act': 'silu',
    'max_position_embeddings': config.max_position,
    'rms_norm_eps': config.rms_norm_eps,
    'rope_theta': config.rope_theta,
    'rope_scaling': dict(config.rope_scaling) if config.rope_scaling else None,
    'tie_word_embeddings': config.tie_embeddings,
    'torch_dtype': dtype,
  }
  if config.family != 'qwen2':
    data['attention_bias'] = config.attention_bias
  if config.family != 'llama':
    data['use_sliding_window'] = False
  if config.num_experts:
    data |= {
      'num_experts': config.num_experts,
      'num_experts_per_tok': config.num_experts_per_token,
      'moe_intermediate_size': config.moe_intermediate_size,
      'norm_topk_prob': config.norm_topk_prob,
      'decoder_sparse_step': 1,
      'mlp_only_layers': [],
    }
  return data


def _experts(data: Mapping[str, Any], where: str) -> dict[str, Any]:
  """What a mixture of experts has beside; every layer must have them."""
  if data['model_type'] != 'qwen3_moe':
    return {}
  dense, step = data.get('mlp_only_layers') or [], data.get('decoder_sparse_step', 1)
  if dense or step != 1:
    raise ValueError(
      f'{where}: layers without experts beside others with them are not supported '
      f'(mlp_only_layers={dense}, decoder_sparse_step={step})'
    )
  # transformers 5 writes the number under another name; both mean the same.
  number = data.get('num_experts', data.get('num_local_experts', 128))
  return {
    'num_experts': number,
    'num_experts_per_token': data.get('num_experts_per_tok', 8),
    'moe_intermediate_size': data.get('moe_intermediate_size', 768),
    'norm_topk_prob': bool(data.get('norm_topk_prob', False)),
  }


def _refuse_sliding_window(data: Mapping[str, Any], where: str) -> None:
  kinds = set(data.get('layer_types') or ['full_attention'])
  windowed = kinds != {'full_attention'}
  if data.get('layer_types') is None and data.get('use_sliding_window'):
    first = data.get('max_window_layers', 28)
    windowed = (
      data.get('sliding_window', 4096) is not None and first < data['num_hidden_layers']
    )
  if windowed:
    raise ValueError(
      f'{where}: sliding-window attention is not supported (use_sliding_window='
      f'{data.get("use_sliding_window")}, layer_types={sorted(kinds)})'
    )


def _rope(data: Mapping[str, Any], where: str) -> tuple[float, tuple | None]:
  """Rotary base and scaling, from the old keys or from `rope_parameters`."""
  settings = dict(data.get('rope_parameters') or data.get('rope_scaling') or {})
  if any(isinstance(value, Mapping) for value in settings.values()):
    raise ValueError(f'{where}: rotary settings per layer type are not supported')
  theta = settings.pop('rope_theta', None) or data.get('rope_theta') or ROPE_THETA
  kind = settings.pop('rope_type', None)
  kind = settings.pop('type', None) if kind is None else kind
  settings.pop('type', None)
  if settings.pop('partial_rotary_factor', 1.0) != 1.0:
    raise ValueError(f'{where}: partial_rotary_factor other than 1 is not supported')
  settings = {name: value for name, value in settings.items() if value is not None}
  if kind in (None, 'default'):
    if settings:
      raise ValueError(f'{where}: rotary settings without a rope_type: {settings}')
    return float(theta), None
  try:
    rope.check_scaling(kind, settings)
  except ValueError as error:
    raise ValueError(f'{where}: {error}') from error
  return float(theta), tuple(sorted({'rope_type': kind, **settings}.items()))
