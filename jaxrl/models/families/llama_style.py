"""Llama-style settings and tensor names, which most families share.

A setting that would change the forward pass and is not supported is an error; one that
the forward pass never reads is metadata and ignored.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from jaxrl.models import rope
from jaxrl.models.families.family_spec import ConfigFields, ConfigJson
from jaxrl.options import JsonObject

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
  'attention_dropout': 0.0,
  'mlp_bias': False,
}
# For families of which `transformers` assumes a token that a small vocabulary lacks; a
# tokenizer's own is written over it.
NO_PADDING = {'pad_token_id': None}
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
POST_NORM_TENSORS = {
  'attention_post_norm.scale': f'{_LAYER}post_attention_layernorm.weight',
  'mlp_post_norm.scale': f'{_LAYER}post_feedforward_layernorm.weight',
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
  data: ConfigJson,
  where: str,
  *,
  max_position: int,
  num_kv_heads: int | None = None,
  head_dim: int | None = None,
  rope_theta: float = ROPE_THETA,
  rms_norm_eps: float = 1e-6,
  tie_embeddings: bool = False,
  activation: tuple[str, str] = ('hidden_act', 'silu'),
  partial_rotary: bool = False,
  has_windows: bool = False,
  longrope: bool = False,
) -> ConfigFields:
  """Reads the settings that Llama-style families share.

  Args:
    data: The contents of a config.json.
    where: What error messages begin with.
    max_position: What `transformers` assumes where config.json is silent.
    num_kv_heads: Likewise; None for as many as query heads.
    head_dim: Likewise; None for the width divided by the number of heads.
    rope_theta: Likewise.
    rms_norm_eps: Likewise.
    tie_embeddings: Likewise.
    activation: The setting that names the MLP's activation, and the only value that is
      supported.
    partial_rotary: Whether the family can rotate a part of each head.
    has_windows: Whether the family reads windows of attention itself.
    longrope: Whether the family has that rotary scaling.

  Returns:
    Fields of `ModelConfig`.

  Raises:
    ValueError: If a size is missing, or a setting is not supported.
  """
  missing = [name for name in SIZES.values() if not isinstance(data.get(name), int)]
  if missing:
    raise ValueError(f'{where}: {", ".join(missing)} must be given as whole numbers')
  if quantized := data.get('quantization_config'):
    method = quantized.get('quant_method') or quantized
    raise ValueError(
      f'{where}: quantization_config={method!r} is not supported, only weights in '
      'bfloat16, float16 or float32'
    )
  fixed = FIXED_SETTINGS | dict([activation])
  for name, value in fixed.items():
    if data.get(name, value) not in (value, None):
      raise ValueError(
        f'{where}: {name}={data[name]!r} is not supported, only {value!r}'
      )
  if not has_windows:
    refuse_sliding_window(data, where)
  sizes: dict[str, int] = {ours: data[theirs] for ours, theirs in SIZES.items()}
  num_heads: int = sizes['num_heads']
  hidden_size: int = sizes['hidden_size']
  default_head_dim = hidden_size // num_heads if head_dim is None else head_dim
  return {
    **sizes,
    'num_kv_heads': data.get('num_key_value_heads') or num_kv_heads or num_heads,
    'head_dim': data.get('head_dim') or default_head_dim,
    **read_rope(
      data, where, theta=rope_theta, partial=partial_rotary, longrope=longrope
    ),
    'rms_norm_eps': data.get('rms_norm_eps', rms_norm_eps),
    'max_position': data.get('max_position_embeddings', max_position),
    'tie_embeddings': data.get('tie_word_embeddings', tie_embeddings),
  }


def write_settings(config: 'ModelConfig') -> JsonObject:
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


def refuse_sliding_window(data: ConfigJson, where: str) -> None:
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


LAYER_TYPES = ('full_attention', 'sliding_attention')


def read_layer_types(
  data: ConfigJson,
  where: str,
  default: Callable[[int], str],
  known: tuple[str, ...] = LAYER_TYPES,
) -> tuple[str, ...]:
  """Reads the types of layers, such as which of them attend within a window.

  Args:
    data: The contents of a config.json.
    where: What error messages begin with.
    default: The type of a layer, by its number, where config.json is silent.
    known: The types that the family has.

  Returns:
    One of `known` for each layer.

  Raises:
    ValueError: If there are other types, or more or fewer than there are layers.
  """
  number = data['num_hidden_layers']
  types = data.get('layer_types')
  types = tuple(map(default, range(number)) if types is None else types)
  if unknown := set(types) - set(known):
    raise ValueError(
      f'{where}: layer_types: {min(unknown)!r} is not supported, only '
      f'{" and ".join(known)}'
    )
  if len(types) != number:
    raise ValueError(
      f'{where}: layer_types names {len(types)} layers, not num_hidden_layers={number}'
    )
  return types


def read_window(data: ConfigJson, where: str, default: int | None) -> int:
  """Reads how many keys a query of a windowed layer sees.

  Args:
    data: The contents of a config.json.
    where: What error messages begin with.
    default: What `transformers` assumes where config.json is silent.

  Returns:
    The number, 0 for all.

  Raises:
    ValueError: If it is not a number of at least 1.
  """
  window = data.get('sliding_window', default)
  if window is None:
    return 0
  if not isinstance(window, int) or window < 1:
    raise ValueError(f'{where}: sliding_window={window!r} must be a number from 1 on')
  return window


def layer_kinds(types: tuple[str, ...], **kinds: ConfigFields) -> ConfigFields:
  """Returns the fields of `ModelConfig` for layers of several kinds.

  Args:
    types: The kind of each layer.
    **kinds: The fields that each kind has of its own; kinds that no layer is of are
      left out.
  """
  kind_fields = ((kind, tuple(kinds[kind].items())) for kind in dict.fromkeys(types))
  return {'layer_types': types, 'layer_kinds': tuple(kind_fields)}


def write_windows(config: 'ModelConfig') -> JsonObject:
  """Returns the settings in config.json for layers some of which have windows."""
  window = max(layer.window for layer in config.layer_configs)
  return {'layer_types': list(config.layer_types), 'sliding_window': window or None}


def windowed_options(*, window: int = 64, tie_embeddings: bool = True) -> ConfigFields:
  """Returns the `ModelConfig` fields that a call string sets for a random model.

  Every fourth layer attends to all tokens, the others within a window.

  Args:
    window: How many keys a query of a windowed layer sees.
    tie_embeddings: Whether tokens are scored by the table that embeds them.
  """
  types = (LAYER_TYPES[1],) * 3 + LAYER_TYPES[:1]
  kinds = {'full_attention': {}, 'sliding_attention': {'window': window}}
  return {'tie_embeddings': tie_embeddings, **layer_kinds(types, **kinds)}


def split_rope(
  data: ConfigJson, where: str, *, theta: float, local: tuple[str, float | None]
) -> tuple[JsonObject, ConfigFields]:
  """Reads rotary settings that differ between full attention and windows.

  Args:
    data: The contents of a config.json.
    where: What error messages begin with.
    theta: The base for full attention that `transformers` assumes.
    local: The old key of the base for windows, and the base that `transformers`
      assumes; None for that of full attention.

  Returns:
    The contents with the rotary settings of full attention alone, for `read_settings`;
    and the fields of `ModelConfig` that layers with windows have of their own.

  Raises:
    ValueError: If a scaling is not supported.
  """
  rope_parameters, (key, local_theta) = data.get('rope_parameters'), local
  if rope_parameters is None:
    full = dict(data.get('rope_scaling') or {})
    full['rope_theta'] = data.get('rope_theta') or theta
    windowed = {'rope_theta': data.get(key) or local_theta or full['rope_theta']}
  elif set(rope_parameters) <= set(LAYER_TYPES):
    full, windowed = (dict(rope_parameters.get(name) or {}) for name in LAYER_TYPES)
    windowed.setdefault('rope_theta', local_theta or full.get('rope_theta') or theta)
  else:
    raise ValueError(
      f'{where}: rope_parameters must have {" and ".join(LAYER_TYPES)}, not '
      f'{", ".join(sorted(rope_parameters))}'
    )
  rest = {name: value for name, value in data.items() if name != 'rope_scaling'}
  settings = {**rest, 'rope_parameters': {'rope_theta': theta, **full}}
  return settings, read_rope({'rope_parameters': windowed}, where)


def write_split_rope(config: 'ModelConfig') -> JsonObject:
  """Returns the rotary settings in config.json of each type of layer."""
  rope_parameters = {}
  for name, layer in zip(config.layer_types, config.layer_configs, strict=True):
    scaling = dict(layer.rope_scaling or {'rope_type': 'default'})
    rope_parameters[name] = {**scaling, 'rope_theta': layer.rope_theta}
  return {'rope_parameters': rope_parameters}


def differing(kind_fields: ConfigJson, fields: ConfigFields) -> ConfigFields:
  """Returns those of a kind's own fields that are not the whole model's anyway."""
  return {name: value for name, value in kind_fields.items() if fields[name] != value}


def read_rope(
  data: ConfigJson,
  where: str,
  *,
  theta: float = ROPE_THETA,
  partial: bool = False,
  longrope: bool = False,
) -> ConfigFields:
  """Reads the rotary base and scaling, from the old keys or from `rope_parameters`.

  Args:
    data: The contents of a config.json.
    where: What error messages begin with.
    theta: The base that `transformers` assumes where config.json is silent.
    partial: Whether the family can rotate a part of each head.
    longrope: Whether it has the scaling 'longrope'.

  Returns:
    Fields of `ModelConfig`: the base; the scaling's settings as sorted pairs with
    `rope_type` among them, or None; and, if `partial`, the fraction.

  Raises:
    ValueError: If the scaling is not supported.
  """
  settings = dict(data.get('rope_parameters') or data.get('rope_scaling') or {})
  if any(isinstance(value, Mapping) for value in settings.values()):
    raise ValueError(f'{where}: rotary settings per layer type are not supported')
  if 'longrope' in (settings.get('rope_type'), settings.get('type')) and not longrope:
    raise ValueError(f"{where}: rope scaling 'longrope' is not supported here")
  theta = settings.pop('rope_theta', None) or data.get('rope_theta') or theta
  fraction = settings.pop('partial_rotary_factor', None)
  if fraction is None:
    fraction = data.get('partial_rotary_factor')
  fraction = 1.0 if fraction is None else float(fraction)
  if settings.get('rope_type') == 'proportional':  # which takes it itself
    settings['partial_rotary_factor'], fraction = fraction, 1.0
  if fraction != 1.0 and not partial:
    raise ValueError(f'{where}: partial_rotary_factor other than 1 is not supported')
  scaling = read_scaling(settings, where)
  fields = {'rope_theta': float(theta), 'rope_scaling': scaling}
  return fields | ({'rope_fraction': fraction} if partial else {})


def read_scaling(settings: ConfigJson, where: str) -> tuple | None:
  """Reads the settings of a rotary scaling.

  Args:
    settings: What config.json says, without base and fraction.
    where: What error messages begin with.

  Returns:
    Sorted pairs with `rope_type` among them; None for no scaling.

  Raises:
    ValueError: If the scaling is not supported.
  """
  settings = {name: value for name, value in settings.items() if value is not None}
  kind = settings.pop('rope_type', None)
  old_kind = settings.pop('type', None)
  kind = old_kind if kind is None else kind
  if kind in (None, 'default'):
    if settings:
      raise ValueError(f'{where}: rotary settings without a rope_type: {settings}')
    return None
  try:
    rope.check_scaling(kind, settings)
  except ValueError as error:
    raise ValueError(f'{where}: {error}') from error
  whole = {'rope_type': kind, **settings}
  pairs = ((k, tuple(v) if isinstance(v, list) else v) for k, v in whole.items())
  return tuple(sorted(pairs))
