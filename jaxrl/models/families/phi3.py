"""Phi-3, Phi-4 and Phi-4-mini: projections of attention and MLP are stored together.

Of LongRoPE, only the factors for sequences of up to `original_max_position_embeddings`
tokens are computed, so that is the longest sequence of such a model.
"""

from typing import TYPE_CHECKING

from jaxrl.models.families import llama_style
from jaxrl.models.families.family_spec import ConfigFields, ConfigJson, FamilySpec
from jaxrl.options import JsonObject

if TYPE_CHECKING:
  from jaxrl.models.model_config import ModelConfig


_LAYER = 'model.layers.{layer}.'
_QKV = f'{_LAYER}self_attn.qkv_proj.weight'
_GATE_UP = f'{_LAYER}mlp.gate_up_proj.weight'


def _with_longrope(data: ConfigJson) -> ConfigJson:
  """Returns the config with all settings of the RoPE scaling in its section."""
  name = 'rope_parameters' if data.get('rope_parameters') else 'rope_scaling'
  settings = dict(data.get(name) or {})
  # Earlier versions of the format had other names.
  if not {settings.get('rope_type'), settings.get('type')} & {'longrope', 'su', 'yarn'}:
    return data
  settings |= {'rope_type': 'longrope', 'type': None}
  length = settings.get('original_max_position_embeddings')
  length = length or data.get('original_max_position_embeddings', 4096)
  settings['original_max_position_embeddings'] = length
  whole = data.get('max_position_embeddings', 4096)
  settings['factor'] = settings.get('factor') or whole / length
  return {**data, name: settings}


def _read(data: ConfigJson, where: str) -> ConfigFields:
  fields = llama_style.read_settings(
    _with_longrope(data),
    where,
    max_position=4096,
    rms_norm_eps=1e-5,
    partial_rotary=True,
    has_windows=True,
    longrope=True,
  )
  if fields['rope_scaling']:
    scaling = dict(fields['rope_scaling'])
    if scaling['rope_type'] != 'longrope':
      raise ValueError(
        f'{where}: rope scaling {scaling["rope_type"]!r} is not supported here'
      )
    width = int(fields['head_dim'] * fields['rope_fraction']) // 2
    for name in ('short_factor', 'long_factor'):
      if len(scaling[name]) != width:
        raise ValueError(
          f'{where}: {name} has {len(scaling[name])} numbers, but {width} frequencies '
          'are rotated'
        )
    fields['max_position'] = scaling['original_max_position_embeddings']
  for name in ('resid_pdrop', 'embd_pdrop'):
    if data.get(name):
      raise ValueError(f'{where}: {name}={data[name]} is not supported, only 0.0')
  return fields | {
    'attention_bias': False,
    'qk_norm': False,
    'window': llama_style.read_window(data, where, None),
  }


def _write(config: 'ModelConfig') -> JsonObject:
  written = llama_style.write_settings(config)
  if scaling := dict(config.rope_scaling or ()):
    written['original_max_position_embeddings'] = config.max_position
    written['max_position_embeddings'] = round(config.max_position * scaling['factor'])
  return written | {
    'partial_rotary_factor': config.rope_fraction,
    'sliding_window': config.window or None,
    **llama_style.NO_PADDING,
  }


PHI3 = FamilySpec(
  model_type='phi3',
  architecture='Phi3ForCausalLM',
  read_config=_read,
  write_config=_write,
  top_tensors=llama_style.TOP_TENSORS,
  layer_tensors=llama_style.ATTENTION_TENSORS
  | llama_style.MLP_TENSORS
  | {f'attention.{name}.kernel': _QKV for name in 'qkv'}
  | {f'mlp.{name}.kernel': _GATE_UP for name in ('gate', 'up')},
  attention_bias=False,
)
