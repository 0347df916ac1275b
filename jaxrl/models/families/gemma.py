"""Gemma 2 and 3 (text): norms around attention and MLP, windows, scaled embeddings."""

import dataclasses
from typing import TYPE_CHECKING

from jaxrl.models.families import llama_style
from jaxrl.models.families.family_spec import ConfigFields, ConfigJson, FamilySpec
from jaxrl.options import JsonObject

if TYPE_CHECKING:
  from jaxrl.models.model_config import ModelConfig

TENSORS = (
  llama_style.ATTENTION_TENSORS
  | llama_style.POST_NORM_TENSORS
  | llama_style.MLP_TENSORS
  | {'mlp_norm.scale': 'model.layers.{layer}.pre_feedforward_layernorm.weight'}
)
ACTIVATION = 'hidden_activation', 'gelu_pytorch_tanh'


def _read(
  data: ConfigJson,
  where: str,
  *,
  pattern: int,
  max_position: int,
  local_rope: ConfigJson,
  qk_norm: bool,
  softcaps: tuple[float | None, float | None],
) -> ConfigFields:
  """Reads what both generations share.

  Args:
    data: The content of config.json.
    where: What errors begin with.
    pattern: One of so many layers has full attention.
    max_position: What `transformers` assumes, as in the other arguments.
    local_rope: Settings of the rotary positions in layers with windows.
    qk_norm: Whether queries and keys are normalized.
    softcaps: Of attention and of logits.
  """
  fields = llama_style.read_settings(
    data,
    where,
    max_position=max_position,
    num_kv_heads=4,
    head_dim=256,
    tie_embeddings=True,
    activation=ACTIVATION,
    has_windows=True,
  )
  if data.get('use_bidirectional_attention'):
    raise ValueError(
      f'{where}: use_bidirectional_attention='
      f'{data["use_bidirectional_attention"]!r} is not supported, only causal attention'
    )
  own_type = lambda i: llama_style.LAYER_TYPES[(i + 1) % pattern != 0]  # noqa: E731
  types = llama_style.read_layer_types(data, where, own_type)
  window = llama_style.read_window(data, where, 4096)
  kinds = {
    'full_attention': {},
    'sliding_attention': {
      'window': window,
      **llama_style.differing(local_rope, fields),
    },
  }
  names = 'attn_logit_softcapping', 'final_logit_softcapping'
  caps = [data.get(name, cap) for name, cap in zip(names, softcaps, strict=True)]
  scalar = data.get('query_pre_attn_scalar', 256)
  return {
    **fields,
    **llama_style.layer_kinds(types, **kinds),
    'attention_bias': bool(data.get('attention_bias', False)),
    'qk_norm': qk_norm,
    'query_scale': 0.0 if scalar == fields['head_dim'] else scalar**-0.5,
    'attention_softcap': float(caps[0] or 0.0),
    'logits_softcap': float(caps[1] or 0.0),
  }


def _write(config: 'ModelConfig') -> JsonObject:
  written = llama_style.write_settings(config)
  del written['hidden_act']
  scale = config.query_scale
  return {
    **written,
    **llama_style.write_windows(config),
    'hidden_activation': ACTIVATION[1],
    'attention_bias': config.attention_bias,
    'query_pre_attn_scalar': round(scale**-2) if scale else config.head_dim,
    'attn_logit_softcapping': config.attention_softcap or None,
    'final_logit_softcapping': config.logits_softcap or None,
  }


def _read2(data: ConfigJson, where: str) -> ConfigFields:
  return _read(
    data,
    where,
    pattern=2,
    max_position=8192,
    local_rope={},
    qk_norm=False,
    softcaps=(50.0, 30.0),
  )


def _read3(data: ConfigJson, where: str) -> ConfigFields:
  if data.get('attn_logit_softcapping'):
    raise ValueError(
      f'{where}: attn_logit_softcapping={data["attn_logit_softcapping"]} is not '
      'supported in Gemma 3, where transformers ignores it'
    )
  settings, local_rope = llama_style.split_rope(
    data, where, theta=1e6, local=('rope_local_base_freq', 10000.0)
  )
  return _read(
    settings,
    where,
    pattern=data.get('sliding_window_pattern', 6),
    max_position=131072,
    local_rope=local_rope,
    qk_norm=True,
    softcaps=(None, None),
  )


def _write3(config: 'ModelConfig') -> JsonObject:
  written = _write(config) | llama_style.write_split_rope(config)
  del written['rope_theta'], written['rope_scaling']  # those of full attention alone
  return written


GEMMA2 = FamilySpec(
  model_type='gemma2',
  architecture='Gemma2ForCausalLM',
  read_config=_read2,
  write_config=_write,
  top_tensors=llama_style.TOP_TENSORS,
  layer_tensors=TENSORS,
  norms='both',
  zero_centred_norms=True,
  scales_embeddings=True,
  activation='gelu_tanh',
  random_options=llama_style.windowed_options,
)
GEMMA3 = dataclasses.replace(
  GEMMA2,
  model_type='gemma3_text',
  architecture='Gemma3ForCausalLM',
  read_config=_read3,
  write_config=_write3,
  layer_tensors=TENSORS | llama_style.QK_NORM_TENSORS,
  qk_norm=True,
)
