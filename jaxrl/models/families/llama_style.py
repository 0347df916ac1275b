"""Llama-style settings and tensor names, which most families share.

A setting that would change the forward pass and is not supported is an error; one that
the forward pass never reads is metadata and ignored.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxrl.models import rope

if TYPE_CHECKING:
  from jaxrl.models.model_config import ModelConfig

# Field of ModelConfig → key in config.json.
SIZES = {
  'vocab_size': 'vocab_size',
  'hidden_size': 'hidden_size',
  'num_layers': 'num_hidden_layers',
  'num_heads': 'num_attention_heads',
  'intermediate_size': 'intermediate_size',
}
ROPE_THETA = 10000.0
# The only supported value of each setting.
FIXED_SETTINGS = {
  'hidden_act': 'silu',
  'attention_dropout': 0.0,
  'mlp_bias': False,
  'partial_rotary_factor': 1.0,
  'quantization_config': None,
}
TOP_TENSORS = {
  'embedding.table': 'model.embed_tokens.weight',
  'norm.scale': 'model.norm.weight',
  'lm_head.table': 'lm_head.weight',
}
_LAYER = 'model.layers.{layer}.'
ATTENTION_TENSORS = {
  'attention_norm.scale': f'{_LAYER}input_layernorm.weight',
  'attention.q.kernel': f'{_LAYER}self_attn.q_proj.weight',
  'attention.q.bias': f'{_LAYER}self_attn.q_proj.bias',
  'attention.k.kernel': f'{_LAYER}self_attn.k_proj.weight',
  'attention.k.bias': f'{_LAYER}self_attn.k_proj.bias',
  'attention.v.kernel': f'{_LAYER}self_attn.v_proj.weight',
  'attention.v.bias': f'{_LAYER}self_attn.v_proj.bias',
  'attention.o.kernel': f'{_LAYER}self_attn.o_proj.weight',
  'attention.o.bias': f'{_LAYER}self_attn.o_proj.bias',
  'mlp_norm.scale': f'{_LAYER}post_attention_layernorm.weight',
}
QK_NORM_TENSORS = {
  'attention.q_norm.scale': f'{_LAYER}self_attn.q_norm.weight',
  'attention.k_norm.scale': f'{_LAYER}self_attn.k_norm.weight',
}
MLP_TENSORS = {
  'mlp.gate.kernel': f'{_LAYER}mlp.gate_proj.weight',
  'mlp.up.kernel': f'{_LAYER}mlp.up_proj.weight',
  'mlp.down.kernel': f'{_LAYER}mlp.down_proj.weight',
}


def read_settings(
  data: Mapping[str, Any],
  where: str,
  *,
  max_position: int,
  num_kv_heads: int | None = None,
  head_dim: int | None = None,
) -> dict[str, Any]:
  """Reads the settings that Llama-style families share.

  Args:
    data: The contents of a config.json.
    where: What error messages begin with.
    max_position: What `transformers` assumes where config.json is silent.
    num_kv_heads: Likewise; None for as many as query heads.
    head_dim: Likewise; None for the width divided by the number of heads.

  Returns:
    Fields of `ModelConfig`.

  Raises:
    ValueError: If a size is missing, or a setting is not supported.
  """
  missing = [name for name in SIZES.values() if not isinstance(data.get(name), int)]
  if missing:
    raise ValueError(f'{where}: {", ".join(missing)} must be given as whole numbers')
  for name, value in FIXED_SETTINGS.items():
    if data.get(name, value) not in (value, None):
      raise ValueError(
        f'{where}: {name}={data[name]!r} is not supported, only {value!r}'
      )
  refuse_sliding_window(data, where)
  theta, scaling = read_rope(data, where)
  sizes: dict[str, Any] = {ours: data[theirs] for ours, theirs in SIZES.items()}
  num_heads: int = sizes['num_heads']
  hidden_size: int = sizes['hidden_size']
  default_head_dim = hidden_size // num_heads if head_dim is None else head_dim
  return {
    **sizes,
    'num_kv_heads': data.get('num_key_value_heads') or num_kv_heads or num_heads,
    'head_dim': data.get('head_dim') or default_head_dim,
    'rope_theta': theta,
    'rope_scaling': scaling,
    'rms_norm_eps': data.get('rms_norm_eps', 1e-6),
    'max_position': data.get('max_position_embeddings', max_position),
    'tie_embeddings': data.get('tie_word_embeddings', False),
  }


def write_settings(config: 'ModelConfig') -> dict[str, Any]:
  """Returns the settings in config.json that Llama-style families share."""
  return {
    **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
    'num_key_value_heads': config.num_kv_heads,
    'head_dim': config.head_dim,
    'hidden_act': 'silu',
    'max_position_embeddings': config.max_position,
    'rms_norm_eps': config.rms_norm_eps,
    'rope_theta': config.rope_theta,
    'rope_scaling': dict(config.rope_scaling) if config.rope_scaling else None,
    'tie_word_embeddings': config.tie_embeddings,
  }


def refuse_sliding_window(data: Mapping[str, Any], where: str) -> None:
  """Raises ValueError if a config.json asks for sliding-window attention."""
  layer_types = set(data.get('layer_types') or ['full_attention'])
  windowed = layer_types != {'full_attention'}
  if data.get('layer_types') is None and data.get('use_sliding_window'):
    first = data.get('max_window_layers', 28)
    windowed = (
      data.get('sliding_window', 4096) is not None and first < data['num_hidden_layers']
    )
  if windowed:
    raise ValueError(
      f'{where}: sliding-window attention is not supported (use_sliding_window='
      f'{data.get("use_sliding_window")}, layer_types={sorted(layer_types)})'
    )


def read_rope(data: Mapping[str, Any], where: str) -> tuple[float, tuple | None]:
  """Reads the rotary base and scaling, from the old keys or from `rope_parameters`.

  Returns:
    θ, and the scaling's settings as sorted pairs with `rope_type` among them, or None.

  Raises:
    ValueError: If the scaling is not supported.
  """
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
