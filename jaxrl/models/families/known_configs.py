"""Known configs of published models, for plans without their folders.

Each is what its config.json on huggingface.co/Qwen says of the forward pass.
"""

import pathlib
from typing import Any

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
  width: int, layers: int, heads: int, inner: int, *, tied: bool = False, **more: Any
) -> dict[str, Any]:
  return _COMMON | {
    'hidden_size': width,
    'num_hidden_layers': layers,
    'num_attention_heads': heads,
    'intermediate_size': inner,
    'tie_word_embeddings': tied,
    **more,
  }


# name of the repository → contents of config.json
KNOWN_CONFIGS: dict[str, dict[str, Any]] = {
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
}


def find_known_config(folder: str) -> dict[str, Any] | None:
  """Returns the config.json of the model that a folder is named after.

  Args:
    folder: The folder; it need not exist.

  Returns:
    The contents, or None if the model is not known here.
  """
  name = pathlib.PurePath(folder).name.lower()
  return {known.lower(): data for known, data in KNOWN_CONFIGS.items()}.get(name)
