"""Tiny random models of `transformers`, of every family, and ours from their folders.

A case has as few layers as show each kind of them twice, so that the scan over their
pattern is taken, and a window that sequences exceed.
"""

import contextlib
import dataclasses
import functools
import io
import pathlib
import tempfile
from typing import Any

import numpy as np
import pytest

COMMON = {
  'vocab_size': 68,
  'hidden_size': 32,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'intermediate_size': 40,
  'max_position_embeddings': 256,
  'tie_word_embeddings': False,
  'pad_token_id': 0,
  'bos_token_id': 1,
  'eos_token_id': 2,
}
SLIDING, FULL = 'sliding_attention', 'full_attention'
LINEAR = 'linear_attention'
LINEAR_SIZES = {
  'linear_num_key_heads': 2,
  'linear_num_value_heads': 4,
  'linear_key_head_dim': 8,
  'linear_value_head_dim': 6,
  'linear_conv_kernel_dim': 4,
}
DEFAULT = {'rope_type': 'default', 'rope_theta': 1000.0}
YARN = {
  'rope_type': 'yarn',
  'factor': 16.0,
  'original_max_position_embeddings': 16,
  'rope_theta': 1000.0,
}
WINDOW = 8


# Other configs of a family, whose modes are those of the family's own case.
VARIANTS = (
  *('qwen3-moe-some', 'mistral-full', 'gemma4-moe', 'phi3-longrope'),
  *('qwen3_5-vl', 'qwen3_5-moe-vl'),
)
# Families whose layers are made of parts that others in a mode's tests have, too.
ALIKE = (
  *('qwen2', 'llama', 'mistral', 'phi3', 'gemma3', 'glm4-moe-lite'),
  *('qwen3_5', 'qwen3_5-moe'),
)
# The families whose layers differ most from each other.
DISTINCT = ('qwen3-moe', 'qwen3_5-vl', 'gemma4', 'gpt-oss', 'deepseek-v3')
# Those that `make test` compares. They have linear, sliding and latent attention,
# sinks, experts and images.
FAST = ('qwen3_5-vl', 'gpt-oss', 'deepseek-v3')


@dataclasses.dataclass(frozen=True)
class Case:
  """A family and what its tiny model has of its own.

  Attributes:
    name: What begins the names of its classes in `transformers`.
    settings: Of its config, beside COMMON.
    context_obstacle: What a mesh that splits rows is refused for; '' if it is not.
    has_experts: Whether it is a mixture of experts.
    config: What else the name of its config's class has.
    query_norm: What the scales of its queries' norms are multiplied by.
    head: What ends the name of its model's class.
    vision: Its tower's settings, if it sees images.
  """

  name: str
  settings: dict[str, Any]
  context_obstacle: str = ''
  has_experts: bool = False
  config: str = ''
  query_norm: float = 1.0
  head: str = 'ForCausalLM'
  vision: dict[str, Any] | None = None


EXPERTS = {
  'num_hidden_layers': 4,
  'n_routed_experts': 8,
  'num_experts_per_tok': 3,
  'moe_intermediate_size': 16,
  'n_shared_experts': 2,
  'n_group': 4,
  'topk_group': 2,
  'routed_scaling_factor': 1.5,
}
LATENTS = {
  'num_key_value_heads': 4,
  'kv_lora_rank': 16,
  'qk_nope_head_dim': 12,
  'qk_rope_head_dim': 8,
}
LLAMA3 = {
  'rope_type': 'llama3',
  'rope_theta': 1000.0,
  'factor': 8.0,
  'high_freq_factor': 4.0,
  'low_freq_factor': 1.0,
  'original_max_position_embeddings': 16,
}
TOWER = {
  'depth': 2,
  'hidden_size': 24,
  'num_heads': 2,
  'intermediate_size': 40,
  'patch_size': 4,
  'out_hidden_size': 32,
  'num_position_embeddings': 16,
}
CASES = {
  'qwen2': Case('Qwen2', {}),
  'qwen3': Case('Qwen3', {'head_dim': 16, 'rope_parameters': YARN}),
  'qwen3-moe': Case(
    'Qwen3Moe',
    {
      'head_dim': 16,
      'num_experts': 4,
      'num_experts_per_tok': 2,
      'moe_intermediate_size': 16,
      'norm_topk_prob': True,
    },
    has_experts=True,
  ),
  'qwen3-moe-some': Case(
    'Qwen3Moe',
    {
      'num_hidden_layers': 6,
      'num_experts': 4,
      'num_experts_per_tok': 2,
      'moe_intermediate_size': 16,
      'norm_topk_prob': True,
      'decoder_sparse_step': 2,
      'mlp_only_layers': [5],
    },
    has_experts=True,
  ),
  'qwen3-next': Case(
    'Qwen3Next',
    {
      'num_hidden_layers': 4,
      'layer_types': [LINEAR, FULL] * 2,
      'mlp_only_layers': [0, 2],
      'head_dim': 16,
      'num_experts': 4,
      'num_experts_per_tok': 2,
      'moe_intermediate_size': 16,
      'shared_expert_intermediate_size': 24,
      **LINEAR_SIZES,
    },
    'gated DeltaNet layers',
    has_experts=True,
  ),
  'qwen3_5': Case(
    'Qwen3_5',
    {
      'num_hidden_layers': 4,
      'layer_types': [LINEAR, FULL] * 2,
      'head_dim': 16,
      'attention_bias': True,
      'rope_parameters': DEFAULT | {'partial_rotary_factor': 0.5},
      'tie_word_embeddings': True,
      **LINEAR_SIZES,
    },
    'gated DeltaNet layers',
    config='Text',
  ),
  'qwen3_5-moe': Case(
    'Qwen3_5Moe',
    {
      'num_hidden_layers': 4,
      'full_attention_interval': 2,
      'head_dim': 16,
      'num_experts': 4,
      'num_experts_per_tok': 2,
      'moe_intermediate_size': 16,
      'shared_expert_intermediate_size': 24,
      **LINEAR_SIZES,
    },
    'gated DeltaNet layers',
    has_experts=True,
    config='Text',
  ),
  'qwen3_5-vl': Case(
    'Qwen3_5',
    {
      'num_hidden_layers': 4,
      'layer_types': [LINEAR, FULL] * 2,
      'head_dim': 16,
      'rope_parameters': DEFAULT
      | {'partial_rotary_factor': 0.5, 'mrope_section': [2, 1, 1]},
      **LINEAR_SIZES,
    },
    'gated DeltaNet layers',
    head='ForConditionalGeneration',
    vision=TOWER,
  ),
  'qwen3_5-moe-vl': Case(
    'Qwen3_5Moe',
    {
      'num_hidden_layers': 2,
      'full_attention_interval': 2,
      'head_dim': 16,
      'rope_parameters': DEFAULT
      | {'partial_rotary_factor': 0.5, 'mrope_section': [2, 1, 1]},
      'num_experts': 4,
      'num_experts_per_tok': 2,
      'moe_intermediate_size': 16,
      'shared_expert_intermediate_size': 24,
      **LINEAR_SIZES,
    },
    'gated DeltaNet layers',
    has_experts=True,
    head='ForConditionalGeneration',
    vision=TOWER,
  ),
  'qwen3-vl': Case(
    'Qwen3VL',
    {
      'head_dim': 16,
      'num_hidden_layers': 3,
      'rope_parameters': DEFAULT | {'mrope_section': [4, 2, 2]},
    },
    head='ForConditionalGeneration',
    vision=TOWER | {'depth': 4, 'deepstack_visual_indexes': [0, 2]},
  ),
  'llama': Case('Llama', {'rope_parameters': LLAMA3}),
  'mistral': Case('Mistral', {'sliding_window': WINDOW}, 'window'),
  'mistral-full': Case('Mistral', {'sliding_window': None, 'head_dim': 16}),
  'ministral': Case(
    'Ministral',
    {
      'sliding_window': WINDOW,
      'head_dim': 16,
      'num_hidden_layers': 5,
      'layer_types': [SLIDING, FULL] * 2 + [SLIDING],
    },
    'window',
  ),
  'ministral3': Case(
    'Ministral3',
    {
      'head_dim': 16,
      'rope_parameters': YARN
      | {'mscale': 1.0, 'mscale_all_dim': 1.0, 'llama_4_scaling_beta': 0.1},
    },
  ),
  'phi3': Case(
    'Phi3',
    {
      'sliding_window': WINDOW,
      'rope_parameters': DEFAULT | {'partial_rotary_factor': 0.5},
    },
    'window',
  ),
  'phi3-longrope': Case(
    'Phi3',
    {
      'original_max_position_embeddings': 64,
      'rope_parameters': {
        'rope_type': 'longrope',
        'rope_theta': 1000.0,
        'partial_rotary_factor': 0.75,
        'short_factor': [1.0, 1.2, 1.5],
        'long_factor': [1.0, 3.0, 9.0],
      },
    },
  ),
  'smollm3': Case('SmolLM3', {'num_hidden_layers': 9, 'tie_word_embeddings': True}),
  'olmo3': Case(
    'Olmo3',
    {
      'sliding_window': WINDOW,
      'num_hidden_layers': 5,
      'layer_types': [SLIDING, FULL] * 2 + [SLIDING],
      'rope_parameters': {SLIDING: DEFAULT, FULL: YARN},
    },
    'window',
  ),
  'gemma2': Case(
    'Gemma2',
    {
      'head_dim': 16,
      'sliding_window': WINDOW,
      'num_hidden_layers': 5,
      'query_pre_attn_scalar': 20,
      'attn_logit_softcapping': 3.0,
      'final_logit_softcapping': 2.0,
      'rope_parameters': DEFAULT,
    },
    'scale and softcap',
  ),
  'gemma3': Case(
    'Gemma3',
    {
      'head_dim': 16,
      'sliding_window': WINDOW,
      'num_hidden_layers': 5,
      'layer_types': [SLIDING, FULL] * 2 + [SLIDING],
      'query_pre_attn_scalar': 16,
      'final_logit_softcapping': 2.0,
      'tie_word_embeddings': True,
      'rope_parameters': {SLIDING: DEFAULT, FULL: YARN | {'rope_theta': 5000.0}},
    },
    'window',
    config='Text',
  ),
  'gemma4': Case(
    'Gemma4',
    {
      'head_dim': 16,
      'global_head_dim': 24,
      'sliding_window': WINDOW,
      'num_hidden_layers': 8,
      'layer_types': [SLIDING, FULL] * 4,
      'num_kv_shared_layers': 2,
      'use_double_wide_mlp': True,
      'hidden_size_per_layer_input': 8,
      'vocab_size_per_layer_input': 68,
      'final_logit_softcapping': 2.0,
      'tie_word_embeddings': True,
    },
    'scale',
    config='Text',
    query_norm=0.25,
  ),
  'gemma4-moe': Case(
    'Gemma4',
    {
      'enable_moe_block': True,
      'num_experts': 4,
      'top_k_experts': 2,
      'moe_intermediate_size': 16,
      'head_dim': 16,
      'global_head_dim': 24,
      'sliding_window': WINDOW,
      'layer_types': [SLIDING, FULL],
      'attention_k_eq_v': True,
      'num_key_value_heads': 4,
      'num_global_key_value_heads': 2,
      'hidden_size_per_layer_input': 0,
      'tie_word_embeddings': True,
    },
    'scale',
    has_experts=True,
    config='Text',
    query_norm=0.25,
  ),
  'gpt-oss': Case(
    'GptOss',
    {
      'head_dim': 16,
      'sliding_window': WINDOW,
      'num_hidden_layers': 4,
      'num_local_experts': 4,
      'num_experts_per_tok': 2,
      'rope_parameters': YARN | {'truncate': False},
    },
    'sinks and window',
    has_experts=True,
  ),
  'glm4-moe': Case(
    'Glm4Moe',
    {
      **EXPERTS,
      'head_dim': 16,
      'first_k_dense_replace': 2,
      'attention_bias': True,
      'use_qk_norm': True,
      'rope_parameters': DEFAULT | {'partial_rotary_factor': 0.5},
    },
    has_experts=True,
  ),
  'glm4-moe-lite': Case(
    'Glm4MoeLite',
    {
      **EXPERTS,
      **LATENTS,
      'mlp_layer_types': ['dense', 'sparse'] * 2,
      'n_group': 1,
      'topk_group': 1,
      'q_lora_rank': None,
      'v_head_dim': 20,
      'rope_interleave': False,
    },
    has_experts=True,
  ),
  'deepseek-v3': Case(
    'DeepseekV3',
    {
      **EXPERTS,
      **LATENTS,
      'first_k_dense_replace': 2,
      'q_lora_rank': 24,
      'v_head_dim': 10,
      'attention_bias': True,
      'rope_parameters': YARN | {'mscale': 1.0, 'mscale_all_dim': 0.7},
    },
    has_experts=True,
  ),
}


IMAGE_TOKENS = {
  'image_token_id': 60,
  'video_token_id': 61,
  'vision_start_token_id': 62,
  'vision_end_token_id': 63,
}


def settings_of(case: Case) -> dict[str, Any]:
  """The options of its config's class."""
  settings = COMMON | case.settings
  if case.vision is None:
    return settings
  tied = {'tie_word_embeddings': settings['tie_word_embeddings']}
  nested = {'text_config': settings, 'vision_config': case.vision}
  return nested | tied | IMAGE_TOKENS


def their_config(name: str):
  """The config of `transformers` whose model is tiny."""
  transformers = pytest.importorskip('transformers')

  case = CASES[name]
  config = getattr(transformers, f'{case.name}{case.config}Config')
  return config(architectures=[case.name + case.head], **settings_of(case))


@functools.cache
def theirs(name: str):
  """The model of `transformers`; biases and norms are moved from their start too."""
  torch = pytest.importorskip('torch')
  import transformers

  case, config = CASES[name], their_config(name)
  torch.manual_seed(0)
  with contextlib.redirect_stderr(io.StringIO()):
    kind = getattr(transformers, f'{case.name}{case.head}')
    model = kind(config)
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.add_(0.1 * torch.randn_like(parameter))
    for key, parameter in model.named_parameters():
      if 'q_norm' in key:  # or softmax is nearly a maximum, whose slope is all rounding
        parameter.mul_(case.query_norm)
    for key, buffer in model.named_buffers():
      if 'correction_bias' in key:
        buffer.add_(0.1 * torch.randn_like(buffer))
  model.config._attn_implementation = 'eager'
  return model.eval()


@functools.cache
def folder(name: str) -> pathlib.Path:
  """Where that model is saved, for as long as the process lives."""
  place = tempfile.TemporaryDirectory(prefix=f'{name}-')
  KEPT.append(place)
  theirs(name).save_pretrained(place.name)
  return pathlib.Path(place.name)


KEPT: list[tempfile.TemporaryDirectory] = []  # removed when the process ends


@functools.cache
def ours(name: str):
  """Our config and parameters, loaded from that folder."""
  from jaxrl.models import huggingface

  return huggingface.load(folder(name))


def tokens(*shape: int, seed: int = 0) -> np.ndarray:
  """Random tokens."""
  return np.random.default_rng(seed).integers(3, 68, shape).astype(np.int32)


def their_logits(model, tokens) -> np.ndarray:
  """The logits `[B, T, V]` of a model of `transformers`."""
  torch = pytest.importorskip('torch')
  with torch.no_grad():
    return model(torch.tensor(tokens, dtype=torch.long)).logits.float().numpy()
