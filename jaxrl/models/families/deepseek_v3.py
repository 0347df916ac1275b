"""DeepSeek-V3 and R1, Kimi K2: latent attention, experts chosen by groups and a bias.

Also what other families share with it: its attention, and its experts.
"""

from typing import TYPE_CHECKING, Any

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

_ATTENTION = 'model.layers.{layer}.self_attn.'
_MLP = 'model.layers.{layer}.mlp.'
LATER_LAYERS = 'the layers that predict several tokens at once'
LATENT_TENSORS = {
  name: text
  for name, text in llama_style.ATTENTION_TENSORS.items()
  if 'attention.k' not in name and 'attention.v' not in name
} | {
  'attention.q_a.kernel': f'{_ATTENTION}q_a_proj.weight',
  'attention.q_a.bias': f'{_ATTENTION}q_a_proj.bias',
  'attention.q_norm.scale': f'{_ATTENTION}q_a_layernorm.weight',
  'attention.q_b.kernel': f'{_ATTENTION}q_b_proj.weight',
  'attention.kv_a.kernel': f'{_ATTENTION}kv_a_proj_with_mqa.weight',
  'attention.kv_a.bias': f'{_ATTENTION}kv_a_proj_with_mqa.bias',
  'attention.kv_norm.scale': f'{_ATTENTION}kv_a_layernorm.weight',
  'attention.kv_b.kernel': f'{_ATTENTION}kv_b_proj.weight',
}
EXPERT_TENSORS = llama_style.MLP_TENSORS | {
  'mlp.router.kernel': f'{_MLP}gate.weight',
  # Scores differ by less than bfloat16 can tell apart.
  'mlp.correction': StoredAs(f'{_MLP}gate.e_score_correction_bias', dtype='float32'),
  **{
    f'mlp.{ours}.{name}.kernel': f'{_MLP}{theirs}.{name}_proj.weight'
    for ours, theirs in (
      ('experts', 'experts.{expert}'),
      ('shared', 'shared_experts'),
    )
    for name in ('gate', 'up', 'down')
  },
}
# The only supported value of each setting.
_FIXED = {'scoring_func': 'sigmoid', 'topk_method': 'noaux_tc', 'moe_layer_freq': 1}


def read_experts(
  data: ConfigJson,
  where: str,
  *,
  num_experts: int,
  per_token: int,
  inner: int,
  groups: tuple[int, int] = (1, 1),
  scaling: float = 1.0,
  first_dense: int = 1,
) -> ConfigFields:
  """Reads the settings of experts, of which some are shared by all tokens.

  Args:
    data: The contents of a config.json.
    where: What error messages begin with.
    num_experts: What `transformers` assumes where config.json is silent.
    per_token: Likewise.
    inner: Likewise, of an expert's inner width.
    groups: Likewise, of n_group and topk_group.
    scaling: Likewise, of routed_scaling_factor.
    first_dense: Likewise, of first_k_dense_replace, the number of layers without
      experts.

  Returns:
    Fields of `ModelConfig`.

  Raises:
    ValueError: If a setting is not supported.
  """
  for name, value in _FIXED.items():
    if data.get(name, value) != value:
      raise ValueError(
        f'{where}: {name}={data[name]!r} is not supported, only {value!r}'
      )
  number, dense = data['num_hidden_layers'], data.get('first_k_dense_replace')
  dense = first_dense if dense is None else dense
  if not 0 <= dense < number:
    raise ValueError(
      f'{where}: first_k_dense_replace={dense} leaves none of {number} layers with '
      'experts'
    )
  types = data.get('mlp_layer_types') or ['dense'] * dense + ['sparse'] * (
    number - dense
  )
  if len(types) != number or set(types) - {'dense', 'sparse'} or 'sparse' not in types:
    raise ValueError(
      f"{where}: mlp_layer_types must say 'dense' or 'sparse' for each of {number} "
      'layers'
    )
  none = {'num_experts': 0, 'shared_expert_size': 0}
  kinds = llama_style.layer_kinds(tuple(types), dense=none, sparse={})
  width = data.get('moe_intermediate_size', inner)
  return (kinds if 'dense' in types else {}) | {
    'num_experts': data.get('n_routed_experts', num_experts),
    'num_experts_per_token': data.get('num_experts_per_tok', per_token),
    'moe_intermediate_size': width,
    'shared_expert_size': width * (data.get('n_shared_experts', 1) or 0),
    'norm_topk_prob': bool(data.get('norm_topk_prob', True)),
    'router_groups': data.get('n_group') or groups[0],
    'router_top_groups': data.get('topk_group') or groups[1],
    'routed_scaling': float(data.get('routed_scaling_factor', scaling)),
  }


def write_experts(config: 'ModelConfig') -> JsonObject:
  """Returns the settings in config.json that `read_experts` reads."""
  sparse = [layer.num_experts > 0 for layer in config.layer_configs]
  return {
    'n_routed_experts': config.num_experts,
    'num_experts_per_tok': config.num_experts_per_token,
    'moe_intermediate_size': config.moe_intermediate_size,
    'n_shared_experts': config.shared_expert_size // config.moe_intermediate_size,
    'norm_topk_prob': config.norm_topk_prob,
    'n_group': config.router_groups,
    'topk_group': config.router_top_groups,
    'routed_scaling_factor': config.routed_scaling,
    'first_k_dense_replace': sparse.index(True),
    'num_nextn_predict_layers': 0,
    **_FIXED,
  }


def read_latents(
  data: ConfigJson,
  where: str,
  *,
  q_latent: int,
  plain: int,
  value_dim: int,
  **defaults: Any,
) -> ConfigFields:
  """Reads settings that Llama-style families share, and those of latent attention.

  Args:
    data: The contents of a config.json.
    where: What error messages begin with.
    q_latent: What `transformers` assumes where config.json has no q_lora_rank.
    plain: Likewise, of qk_nope_head_dim.
    value_dim: Likewise, of v_head_dim.
    **defaults: As for `llama_style.read_settings`.

  Returns:
    Fields of `ModelConfig`.

  Raises:
    ValueError: If a setting is not supported.
  """
  fields = llama_style.read_settings(data, where, **defaults)
  heads = fields['num_heads']
  if (data.get('num_key_value_heads') or heads) != heads:
    raise ValueError(
      f'{where}: num_key_value_heads={data["num_key_value_heads"]} is not supported, '
      f'only num_attention_heads={heads}'
    )
  rope_dim = data.get('qk_rope_head_dim', 64)
  return fields | {
    'num_kv_heads': heads,
    'head_dim': data.get('qk_nope_head_dim', plain) + rope_dim,
    'kv_latent': data.get('kv_lora_rank', 512),
    'q_latent': data.get('q_lora_rank', q_latent) or 0,
    'value_dim': data.get('v_head_dim', value_dim),
    'rope_dim': rope_dim,
    'rope_interleaved': bool(data.get('rope_interleave', True)),
    'attention_bias': bool(data.get('attention_bias', False)),
    'qk_norm': False,
  }


def write_latents(config: 'ModelConfig') -> JsonObject:
  """Returns the settings in config.json that `read_latents` reads."""
  written = llama_style.write_settings(config)
  del written['head_dim']  # `transformers` has that of the rotated part
  return written | {
    'attention_bias': config.attention_bias,
    'kv_lora_rank': config.kv_latent,
    'q_lora_rank': config.q_latent or None,
    'qk_nope_head_dim': config.head_dim - config.rope_dim,
    'qk_rope_head_dim': config.rope_dim,
    'v_head_dim': config.value_dim,
    'rope_interleave': config.rope_interleaved,
  }


def expert_options(
  *,
  num_experts: int = 8,
  num_experts_per_token: int = 2,
  moe_intermediate_size: int = 128,
  num_groups: int = 1,
  num_top_groups: int = 1,
  tie_embeddings: bool = False,
) -> ConfigFields:
  """Returns the `ModelConfig` fields that a call string sets for a random model.

  Args:
    num_experts: Experts of each layer.
    num_experts_per_token: Those that a token takes.
    moe_intermediate_size: Inner width of an expert, and of the shared one.
    num_groups: Groups of experts.
    num_top_groups: Those that a token may take experts of.
    tie_embeddings: Whether tokens are scored by the table that embeds them.
  """
  return {
    'num_experts': num_experts,
    'num_experts_per_token': num_experts_per_token,
    'moe_intermediate_size': moe_intermediate_size,
    'shared_expert_size': moe_intermediate_size,
    'router_groups': num_groups,
    'router_top_groups': num_top_groups,
    'tie_embeddings': tie_embeddings,
  }


def latent_options(
  *,
  num_experts: int = 8,
  num_experts_per_token: int = 2,
  moe_intermediate_size: int = 128,
  num_groups: int = 1,
  num_top_groups: int = 1,
  kv_latent: int = 32,
  q_latent: int = 48,
  rope_dim: int = 16,
  value_dim: int = 16,
  tie_embeddings: bool = False,
) -> ConfigFields:
  """Returns the `ModelConfig` fields that a call string sets for a random model.

  Args:
    num_experts: As in `expert_options`.
    num_experts_per_token: Likewise.
    moe_intermediate_size: Likewise.
    num_groups: Likewise.
    num_top_groups: Likewise.
    kv_latent: Width of the latent of keys and values.
    q_latent: Width of that of queries, 0 for none.
    rope_dim: How much of a head is rotated.
    value_dim: Width of a head of values.
    tie_embeddings: As in `expert_options`.
  """
  experts = expert_options(
    num_experts=num_experts,
    num_experts_per_token=num_experts_per_token,
    moe_intermediate_size=moe_intermediate_size,
    num_groups=num_groups,
    num_top_groups=num_top_groups,
    tie_embeddings=tie_embeddings,
  )
  return experts | {
    'kv_latent': kv_latent,
    'q_latent': q_latent,
    'rope_dim': rope_dim,
    'value_dim': value_dim,
    'rope_interleaved': True,
  }


def _read(data: ConfigJson, where: str) -> ConfigFields:
  latents = read_latents(
    data, where, q_latent=1536, plain=128, value_dim=128, max_position=4096
  )
  experts = read_experts(
    data,
    where,
    num_experts=256,
    per_token=8,
    inner=2048,
    groups=(8, 4),
    scaling=2.5,
    first_dense=3,
  )
  return latents | experts


def _write(config: 'ModelConfig') -> JsonObject:
  return write_latents(config) | write_experts(config)


DEEPSEEK_V3 = FamilySpec(
  model_type='deepseek_v3',
  architecture='DeepseekV3ForCausalLM',
  read_config=_read,
  write_config=_write,
  top_tensors=llama_style.TOP_TENSORS,
  layer_tensors=LATENT_TENSORS | EXPERT_TENSORS,
  later_layers=LATER_LAYERS,
  has_experts=True,
  router_scores='sigmoid',
  random_options=latent_options,
)
