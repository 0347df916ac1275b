"""Small models of every family, shared by the tests here."""

import jax
import numpy as np

from jaxrl.models.config import ModelConfig
from jaxrl.models.model import Model

LLAMA3 = (
  ('factor', 8.0),
  ('high_freq_factor', 4.0),
  ('low_freq_factor', 1.0),
  ('original_max_position_embeddings', 16),
  ('rope_type', 'llama3'),
)


def config(**changes) -> ModelConfig:
  """Grouped queries, and no two sizes alike."""
  settings = {
    'vocab_size': 67,
    'hidden_size': 24,
    'num_layers': 3,
    'num_heads': 4,
    'num_kv_heads': 2,
    'head_dim': 16,
    'intermediate_size': 40,
    'max_position': 256,
  }
  return ModelConfig(**settings | changes)


def model_and_params(seed: int = 0, **changes) -> tuple[Model, dict]:
  """Parameters are larger than a real start's, so that every part has its say."""
  model = Model(config(**changes))
  leaves, tree = jax.tree.flatten(model.init(jax.random.key(seed)))
  keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
  leaves = [
    leaf + 0.2 * jax.random.normal(k, leaf.shape)
    for leaf, k in zip(leaves, keys, strict=True)
  ]
  return model, jax.tree.unflatten(tree, leaves)


def tokens(*shape: int, seed: int = 0) -> np.ndarray:
  return np.random.default_rng(seed).integers(0, 67, shape).astype(np.int32)
