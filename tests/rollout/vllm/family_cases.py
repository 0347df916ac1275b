"""Tiny models of families for vLLM's CPU build, and what it cannot run."""

from typing import Any

import jax
import numpy as np

from jaxrl.models import families, huggingface
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.vllm import vllm_options
from jaxrl.types import Params
from tests.models.families import cases

WIDE = {'head_dim': 32}  # vLLM's CPU kernels take no head of 16 elements
# The only sizes that its kernel of latent attention takes.
LATENTS = {'kv_lora_rank': 512, 'qk_rope_head_dim': 64}
# Case of `tests.models.families.cases` → what differs from it here.
CASES: dict[str, dict[str, Any]] = {
  'qwen2': {'hidden_size': 128},
  'qwen3': WIDE,
  'qwen3-moe': WIDE,
  'llama': WIDE,
  'mistral': WIDE,
  'ministral': WIDE,
  'ministral3': WIDE,
  'phi3': {'hidden_size': 256},
  'smollm3': {'hidden_size': 128},
  'olmo3': {'hidden_size': 128},
  'gemma2': {**WIDE, 'tie_word_embeddings': True},
  'gemma3': WIDE,
  'gemma4': {**WIDE, 'global_head_dim': 64},
  'gemma4-moe': {**WIDE, 'global_head_dim': 64},
  'glm4-moe': WIDE,
  'glm4-moe-lite': {
    **LATENTS,
    'mlp_layer_types': ['dense', 'sparse', 'sparse', 'sparse'],
    'rope_interleave': True,
  },
  'deepseek-v3': {**LATENTS, 'attention_bias': False},
}
WITH_IMAGES = ('qwen3_vl',)  # compared in `test_vllm_sees_images`
DELTA_NETS = 'qwen3_next', 'qwen3_5_text', 'qwen3_5_moe_text', 'qwen3_5', 'qwen3_5_moe'
# Family → why vLLM's CPU build cannot run it, or not as it is used here.
OBSTACLES = {
  **vllm_options.FAMILY_OBSTACLES,
  **dict.fromkeys(DELTA_NETS, 'its gated DeltaNets compute in bfloat16 only there'),
}


def model_type(name: str) -> str:
  """The name of a case's family."""
  architecture = f'{cases.CASES[name].name}ForCausalLM'
  return next(
    family
    for family in families.BUILT_IN
    if families.find_family(family).architecture == architecture
  )


def settings_of(name: str) -> dict[str, Any]:
  """The contents of a case's config.json, as far as a family reads them."""
  settings = cases.CASES[name].settings | CASES[name]
  return cases.COMMON | settings | {'model_type': model_type(name)}


def make_case(name: str) -> tuple[ModelConfig, Params, Params]:
  """The config of a case, and two versions of its parameters."""
  config = huggingface.config_from_hf(settings_of(name))

  def params(seed: int) -> Params:
    draw = np.random.default_rng(seed)

    def moved(path, x):  # scales and biases from where they start, too
      size = 0.1 if path[-1].key in ('scale', 'correction', 'output_scale') else 0.15
      return np.asarray(x + size * draw.standard_normal(x.shape), np.float32)

    fresh = TransformerLM(config).init(jax.random.key(seed))
    return jax.tree_util.tree_map_with_path(moved, fresh)

  return config, params(1), params(2)
