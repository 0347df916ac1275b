"""Ministral 3, whose queries grow with their positions beside YaRN."""

from typing import TYPE_CHECKING

from jaxrl.models.families import llama_style
from jaxrl.models.families.family_spec import ConfigFields, ConfigJson, FamilySpec
from jaxrl.options import JsonObject

if TYPE_CHECKING:
  from jaxrl.models.model_config import ModelConfig


# What `transformers` assumes where config.json has no rotary settings.
_ROPE = {
  'type': 'yarn',
  'rope_theta': 1000000.0,
  'factor': 16.0,
  'original_max_position_embeddings': 16384,
  'beta_fast': 32.0,
  'beta_slow': 1.0,
  'mscale_all_dim': 1.0,
  'mscale': 1.0,
  'llama_4_scaling_beta': 0.1,
}


def _read(data: ConfigJson, where: str) -> ConfigFields:
  settings = dict(data.get('rope_parameters') or data.get('rope_scaling') or _ROPE)
  settings.pop('max_position_embeddings', None)  # again the one outside
  growth = settings.pop('llama_4_scaling_beta', None)
  if (settings.get('rope_type') or settings.get('type')) in (None, 'default'):
    length = settings.pop('original_max_position_embeddings', None)
    if growth and length != data.get('max_position_embeddings', 262144):
      raise ValueError(
        f'{where}: original_max_position_embeddings={length} other than '
        'max_position_embeddings is not supported without a rope_type'
      )
  fields = llama_style.read_settings(
    {**data, 'rope_parameters': settings},
    where,
    max_position=262144,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    has_windows=True,
  )
  return fields | {
    'attention_bias': False,
    'qk_norm': False,
    'window': llama_style.read_window(data, where, None),
    'query_growth': float(growth or 0.0),
  }


def _write(config: 'ModelConfig') -> JsonObject:
  written = llama_style.write_settings(config)
  theta, scaling = written.pop('rope_theta'), written.pop('rope_scaling')
  rope = {'rope_type': 'default', **(scaling or {}), 'rope_theta': theta}
  rope |= {'llama_4_scaling_beta': config.query_growth}
  # What positions are divided by.
  rope.setdefault('original_max_position_embeddings', config.max_position)
  return {
    **written,
    **llama_style.NO_PADDING,
    'rope_parameters': rope,
    'sliding_window': config.window or None,
  }


MINISTRAL3 = FamilySpec(
  model_type='ministral3',
  architecture='Ministral3ForCausalLM',
  read_config=_read,
  write_config=_write,
  top_tensors=llama_style.TOP_TENSORS,
  layer_tensors=llama_style.ATTENTION_TENSORS | llama_style.MLP_TENSORS,
  attention_bias=False,
)
