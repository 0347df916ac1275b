"""Known configs of published models, for plans without their folders.

Each is what its config.json on huggingface.co says of the forward pass.
"""

import pathlib

from jaxrl.options import JsonObject

_COMMON = {
  'model_type': 'qwen3',
  'vocab_size': 151936,
  'head_dim': 128,
  'num_key_value_heads': 8,
  'max_position_embeddings': 40960,
  'rms_norm_eps': 1e-6,
  'rope_theta': 1000000,
  'hidden_act': 'silu',
  'attention_bias': False,
}


def _qwen3(
  width: int, layers: int, heads: int, inner: int, *, tied: bool = False, **more: object
) -> JsonObject:
  return _COMMON | {
    'hidden_size': width,
    'num_hidden_layers': layers,
    'num_attention_heads': heads,
    'intermediate_size': inner,
    'tie_word_embeddings': tied,
    **more,
  }


# Sizes of gated DeltaNets and of attention beside them, in Qwen3-Next and Qwen3.5.
_HYBRID = {
  'num_attention_heads': 16,
  'head_dim': 256,
  'linear_conv_kernel_dim': 4,
  'linear_key_head_dim': 128,
  'linear_num_key_heads': 16,
  'linear_num_value_heads': 32,
  'linear_value_head_dim': 128,
  'full_attention_interval': 4,
  'max_position_embeddings': 262144,
  'rms_norm_eps': 1e-6,
  'partial_rotary_factor': 0.25,
  'rope_theta': 10000000,
}


def _qwen3_vl(text: JsonObject, **tower: object) -> JsonObject:
  text_settings = {'max_position_embeddings': 262144, 'rope_theta': 5000000}
  sections = {
    'mrope_interleaved': True,
    'mrope_section': [24, 20, 20],
    'rope_type': 'default',
  }
  usual = {
    'num_heads': 16,
    'patch_size': 16,
    'spatial_merge_size': 2,
    'temporal_patch_size': 2,
    'num_position_embeddings': 2304,
    'hidden_act': 'gelu_pytorch_tanh',
    'out_hidden_size': text['hidden_size'],
  }
  return {
    'model_type': 'qwen3_vl',
    'text_config': {
      **text,
      **text_settings,
      'model_type': 'qwen3_vl_text',
      'rope_scaling': sections,
    },
    'vision_config': usual | tower,
    'tie_word_embeddings': text['tie_word_embeddings'],
    'image_token_id': 151655,
    'video_token_id': 151656,
    'vision_start_token_id': 151652,
    'vision_end_token_id': 151653,
  }


_SMALL_TOWER = {
  'depth': 24,
  'hidden_size': 1024,
  'intermediate_size': 4096,
  'deepstack_visual_indexes': [5, 11, 17],
}
_LARGE_TOWER = {
  'depth': 27,
  'hidden_size': 1152,
  'intermediate_size': 4304,
  'deepstack_visual_indexes': [8, 16, 24],
}


_DEEPSEEK = {
  'hidden_size': 7168,
  'num_hidden_layers': 61,
  'intermediate_size': 18432,
  'moe_intermediate_size': 2048,
  'num_experts_per_tok': 8,
  'n_shared_experts': 1,
  'norm_topk_prob': True,
  'scoring_func': 'sigmoid',
  'topk_method': 'noaux_tc',
  'moe_layer_freq': 1,
  'kv_lora_rank': 512,
  'q_lora_rank': 1536,
  'qk_nope_head_dim': 128,
  'qk_rope_head_dim': 64,
  'v_head_dim': 128,
  'attention_bias': False,
  'rms_norm_eps': 1e-6,
  'tie_word_embeddings': False,
}
_DEEPSEEK_ROPE = {
  'type': 'yarn',
  'original_max_position_embeddings': 4096,
  'beta_slow': 1,
  'mscale': 1.0,
  'mscale_all_dim': 1.0,
}
_GLM = {
  'hidden_act': 'silu',
  'n_shared_experts': 1,
  'n_group': 1,
  'topk_group': 1,
  'norm_topk_prob': True,
  'first_k_dense_replace': 1,
  'num_nextn_predict_layers': 1,
  'rms_norm_eps': 1e-5,
  'rope_theta': 1000000,
  'tie_word_embeddings': False,
}

# name of the repository → contents of config.json
KNOWN_CONFIGS: dict[str, JsonObject] = {
  'Qwen3-0.6B': _qwen3(1024, 28, 16, 3072, tied=True),
  'Qwen3-1.7B': _qwen3(2048, 28, 16, 6144, tied=True),
  'Qwen3-4B': _qwen3(2560, 36, 32, 9728, tied=True),
  'Qwen3-8B': _qwen3(4096, 36, 32, 12288),
  'Qwen3-14B': _qwen3(5120, 40, 40, 17408),
  'Qwen3-32B': _qwen3(5120, 64, 64, 25600),
  'Qwen3-30B-A3B': _qwen3(2048, 48, 32, 6144)
  | {
    'model_type': 'qwen3_moe',
    'num_key_value_heads': 4,
    'num_experts': 128,
    'num_experts_per_tok': 8,
    'moe_intermediate_size': 768,
    'norm_topk_prob': True,
    'decoder_sparse_step': 1,
    'mlp_only_layers': [],
  },
  'Qwen3-Next-80B-A3B-Instruct': _HYBRID
  | {
    'model_type': 'qwen3_next',
    'vocab_size': 151936,
    'hidden_size': 2048,
    'num_hidden_layers': 48,
    'num_key_value_heads': 2,
    'intermediate_size': 5120,
    'num_experts': 512,
    'num_experts_per_tok': 10,
    'moe_intermediate_size': 512,
    'shared_expert_intermediate_size': 512,
    'norm_topk_prob': True,
    'decoder_sparse_step': 1,
    'mlp_only_layers': [],
  },
  'Qwen3.5-9B': _HYBRID
  | {  # its text model
    'model_type': 'qwen3_5_text',
    'vocab_size': 248320,
    'hidden_size': 4096,
    'num_hidden_layers': 32,
    'num_key_value_heads': 4,
    'intermediate_size': 12288,
  },
  'Qwen3.5-35B-A3B': _HYBRID
  | {  # its text model
    'model_type': 'qwen3_5_moe_text',
    'vocab_size': 248320,
    'hidden_size': 2048,
    'num_hidden_layers': 40,
    'num_key_value_heads': 2,
    'num_experts': 256,
    'num_experts_per_tok': 8,
    'moe_intermediate_size': 512,
    'shared_expert_intermediate_size': 512,
  },
  'Qwen3-VL-2B-Instruct': _qwen3_vl(
    _qwen3(2048, 28, 16, 6144, tied=True), **_SMALL_TOWER
  ),
  'Qwen3-VL-4B-Instruct': _qwen3_vl(
    _qwen3(2560, 36, 32, 9728, tied=True), **_SMALL_TOWER
  ),
  'Qwen3-VL-8B-Instruct': _qwen3_vl(_qwen3(4096, 36, 32, 12288), **_LARGE_TOWER),
  'Mistral-Small-24B-Instruct-2501': {
    'model_type': 'mistral',
    'vocab_size': 131072,
    'hidden_size': 5120,
    'num_hidden_layers': 40,
    'num_attention_heads': 32,
    'num_key_value_heads': 8,
    'head_dim': 128,
    'intermediate_size': 32768,
    'max_position_embeddings': 32768,
    'rms_norm_eps': 1e-5,
    'rope_theta': 100000000.0,
    'sliding_window': None,
  },
  'Ministral-8B-Instruct-2410': {
    'model_type': 'ministral',
    'vocab_size': 131072,
    'hidden_size': 4096,
    'num_hidden_layers': 36,
    'num_attention_heads': 32,
    'num_key_value_heads': 8,
    'head_dim': 128,
    'intermediate_size': 12288,
    'max_position_embeddings': 32768,
    'rms_norm_eps': 1e-5,
    'rope_theta': 100000000.0,
    'sliding_window': 32768,
  },
  'Ministral-3-8B-Base-2512': {  # its text model
    'model_type': 'ministral3',
    'vocab_size': 131072,
    'hidden_size': 4096,
    'num_hidden_layers': 34,
    'num_attention_heads': 32,
    'num_key_value_heads': 8,
    'head_dim': 128,
    'intermediate_size': 14336,
    'max_position_embeddings': 262144,
    'rms_norm_eps': 1e-5,
    'rope_parameters': {
      'rope_type': 'yarn',
      'rope_theta': 1000000.0,
      'factor': 16.0,
      'original_max_position_embeddings': 16384,
      'beta_fast': 32.0,
      'beta_slow': 1.0,
      'mscale': 1.0,
      'mscale_all_dim': 1.0,
      'llama_4_scaling_beta': 0.1,
    },
  },
  'phi-4': {
    'model_type': 'phi3',
    'vocab_size': 100352,
    'hidden_size': 5120,
    'num_hidden_layers': 40,
    'num_attention_heads': 40,
    'num_key_value_heads': 10,
    'intermediate_size': 17920,
    'max_position_embeddings': 16384,
    'rms_norm_eps': 1e-5,
    'rope_theta': 250000,
  },
  'SmolLM3-3B': {
    'model_type': 'smollm3',
    'vocab_size': 128256,
    'hidden_size': 2048,
    'num_hidden_layers': 36,
    'num_attention_heads': 16,
    'num_key_value_heads': 4,
    'intermediate_size': 11008,
    'max_position_embeddings': 65536,
    'rms_norm_eps': 1e-6,
    'rope_theta': 5000000.0,
    'no_rope_layer_interval': 4,
    'tie_word_embeddings': True,
  },
  'Olmo-3-1025-7B': {
    'model_type': 'olmo3',
    'vocab_size': 100278,
    'hidden_size': 4096,
    'num_hidden_layers': 32,
    'num_attention_heads': 32,
    'num_key_value_heads': 32,
    'intermediate_size': 11008,
    'max_position_embeddings': 65536,
    'rms_norm_eps': 1e-6,
    'rope_theta': 500000,
    'rope_scaling': {
      'rope_type': 'yarn',
      'factor': 8.0,
      'attention_factor': 1.2079441541679836,
      'beta_fast': 32,
      'beta_slow': 1,
      'original_max_position_embeddings': 8192,
    },
    'sliding_window': 4096,
  },
  'gemma-2-2b': {
    'model_type': 'gemma2',
    'vocab_size': 256000,
    'hidden_size': 2304,
    'num_hidden_layers': 26,
    'num_attention_heads': 8,
    'num_key_value_heads': 4,
    'head_dim': 256,
    'intermediate_size': 9216,
    'max_position_embeddings': 8192,
    'rms_norm_eps': 1e-6,
    'rope_theta': 10000.0,
    'query_pre_attn_scalar': 256,
    'sliding_window': 4096,
    'attn_logit_softcapping': 50.0,
    'final_logit_softcapping': 30.0,
    'hidden_activation': 'gelu_pytorch_tanh',
  },
  'gemma-3-1b-it': {
    'model_type': 'gemma3_text',
    'vocab_size': 262144,
    'hidden_size': 1152,
    'num_hidden_layers': 26,
    'num_attention_heads': 4,
    'num_key_value_heads': 1,
    'head_dim': 256,
    'intermediate_size': 6912,
    'max_position_embeddings': 32768,
    'rms_norm_eps': 1e-6,
    'rope_theta': 1000000,
    'rope_local_base_freq': 10000,
    'query_pre_attn_scalar': 256,
    'sliding_window': 512,
    'sliding_window_pattern': 6,
    'hidden_activation': 'gelu_pytorch_tanh',
  },
  'gemma-4-E4B-it': {  # its text model
    'model_type': 'gemma4_text',
    'vocab_size': 262144,
    'hidden_size': 2560,
    'num_hidden_layers': 42,
    'num_attention_heads': 8,
    'num_key_value_heads': 2,
    'head_dim': 256,
    'global_head_dim': 512,
    'intermediate_size': 10240,
    'max_position_embeddings': 131072,
    'rms_norm_eps': 1e-6,
    'sliding_window': 512,
    'num_kv_shared_layers': 18,
    'hidden_size_per_layer_input': 256,
    'vocab_size_per_layer_input': 262144,
    'final_logit_softcapping': 30.0,
    'hidden_activation': 'gelu_pytorch_tanh',
  },
  'gemma-4-26B-A4B-it': {  # its text model
    'model_type': 'gemma4_text',
    'vocab_size': 262144,
    'hidden_size': 2816,
    'num_hidden_layers': 30,
    'num_attention_heads': 16,
    'num_key_value_heads': 8,
    'head_dim': 256,
    'global_head_dim': 512,
    'num_global_key_value_heads': 2,
    'attention_k_eq_v': True,
    'intermediate_size': 2112,
    'enable_moe_block': True,
    'num_experts': 128,
    'top_k_experts': 8,
    'moe_intermediate_size': 704,
    'max_position_embeddings': 262144,
    'rms_norm_eps': 1e-6,
    'sliding_window': 1024,
    'hidden_size_per_layer_input': 0,
    'final_logit_softcapping': 30.0,
    'hidden_activation': 'gelu_pytorch_tanh',
  },
  'gpt-oss-20b': {
    'model_type': 'gpt_oss',
    'vocab_size': 201088,
    'hidden_size': 2880,
    'num_hidden_layers': 24,
    'num_attention_heads': 64,
    'num_key_value_heads': 8,
    'head_dim': 64,
    'intermediate_size': 2880,
    'max_position_embeddings': 131072,
    'rms_norm_eps': 1e-5,
    'rope_theta': 150000,
    'rope_scaling': {
      'rope_type': 'yarn',
      'factor': 32.0,
      'beta_fast': 32.0,
      'beta_slow': 1.0,
      'truncate': False,
      'original_max_position_embeddings': 4096,
    },
    'sliding_window': 128,
    'attention_bias': True,
    'num_local_experts': 32,
    'num_experts_per_tok': 4,
    'swiglu_limit': 7.0,
  },
  'DeepSeek-V3': _DEEPSEEK
  | {
    'model_type': 'deepseek_v3',
    'vocab_size': 129280,
    'num_attention_heads': 128,
    'num_key_value_heads': 128,
    'max_position_embeddings': 163840,
    'n_routed_experts': 256,
    'n_group': 8,
    'topk_group': 4,
    'routed_scaling_factor': 2.5,
    'first_k_dense_replace': 3,
    'num_nextn_predict_layers': 1,
    'rope_theta': 10000,
    'rope_scaling': _DEEPSEEK_ROPE | {'factor': 40, 'beta_fast': 32},
  },
  'Kimi-K2-Instruct': _DEEPSEEK
  | {
    'model_type': 'kimi_k2',
    'vocab_size': 163840,
    'num_attention_heads': 64,
    'num_key_value_heads': 64,
    'max_position_embeddings': 131072,
    'n_routed_experts': 384,
    'n_group': 1,
    'topk_group': 1,
    'routed_scaling_factor': 2.827,
    'first_k_dense_replace': 1,
    'num_nextn_predict_layers': 0,
    'rope_theta': 50000.0,
    'rope_scaling': _DEEPSEEK_ROPE | {'factor': 32.0, 'beta_fast': 1.0},
  },
  'GLM-4.5-Air': _GLM
  | {
    'model_type': 'glm4_moe',
    'vocab_size': 151552,
    'hidden_size': 4096,
    'num_hidden_layers': 46,
    'num_attention_heads': 96,
    'num_key_value_heads': 8,
    'head_dim': 128,
    'partial_rotary_factor': 0.5,
    'attention_bias': True,
    'use_qk_norm': False,
    'intermediate_size': 10944,
    'moe_intermediate_size': 1408,
    'n_routed_experts': 128,
    'num_experts_per_tok': 8,
    'routed_scaling_factor': 1.0,
    'max_position_embeddings': 131072,
  },
  'GLM-4.7-Flash': _GLM
  | {
    'model_type': 'glm4_moe_lite',
    'vocab_size': 154880,
    'hidden_size': 2048,
    'num_hidden_layers': 47,
    'num_attention_heads': 20,
    'num_key_value_heads': 20,
    'kv_lora_rank': 512,
    'q_lora_rank': 768,
    'qk_nope_head_dim': 192,
    'qk_rope_head_dim': 64,
    'v_head_dim': 256,
    'attention_bias': False,
    'intermediate_size': 10240,
    'moe_intermediate_size': 1536,
    'n_routed_experts': 64,
    'num_experts_per_tok': 4,
    'routed_scaling_factor': 1.8,
    'topk_method': 'noaux_tc',
    'max_position_embeddings': 202752,
  },
}


def find_known_config(folder: str) -> JsonObject | None:
  """Returns the config.json of the model that a folder is named after.

  Args:
    folder: The folder; it need not exist.

  Returns:
    The contents, or None if the model is not known here.
  """
  name = pathlib.PurePath(folder).name.lower()
  return {known.lower(): data for known, data in KNOWN_CONFIGS.items()}.get(name)
