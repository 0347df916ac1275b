"""Shapes of Qwen3 models, and what they cost at least."""

from jaxrl.models.model_config import ModelConfig

_QWEN3 = {
  'vocab_size': 151_936,
  'num_layers': 28,
  'num_heads': 16,
  'num_kv_heads': 8,
  'head_dim': 128,
}
MODELS = {  # that of the aims first, should time run out
  'Qwen3-1.7B': ModelConfig(hidden_size=2048, intermediate_size=6144, **_QWEN3),
  'Qwen3-0.6B': ModelConfig(hidden_size=1024, intermediate_size=3072, **_QWEN3),
}
TINY = {
  'tiny': ModelConfig(
    vocab_size=512,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=128,
  )
}


def matrices(config: ModelConfig) -> int:
  """Weights that a token is multiplied by, the table of the logits among them."""
  c = config
  heads = c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
  layer = c.hidden_size * (heads + 3 * c.intermediate_size)
  return c.num_layers * layer + c.vocab_size * c.hidden_size


def train_flops(config: ModelConfig, rows: int, length: int) -> float:
  """Of a forward and a backward pass; what is recomputed does not count."""
  c = config
  attention = 2 * c.num_layers * c.num_heads * c.head_dim * length  # causal: half
  return rows * length * 3 * (2 * matrices(c) + attention)


def decode_bytes(config: ModelConfig, slots: int, length: float) -> float:
  """What one decode step must read in bfloat16: every weight, and the slots' cache."""
  c = config
  cache = 2 * c.num_layers * c.num_kv_heads * c.head_dim * length
  return 2 * (matrices(c) + slots * cache)
