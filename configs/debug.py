"""Runs every part of the quickstart at its smallest size, in seconds."""

from configs import base, quickstart
from jaxrl.config import Config

MODEL = (
  'qwen3(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32, '
  'intermediate_size=64)'
)


def get_config(algorithm: str = 'grpo') -> Config:
  """Returns the smallest config that exercises every part."""
  config = quickstart.get_config(algorithm)
  config.algorithm = base.get_config(algorithm).algorithm  # the preset's own defaults
  config.num_steps = 3
  config.model.random = MODEL
  config.dataset.limit = 100
  config.batch.num_groups = 2
  config.rollout.max_num_seqs = 16
  config.eval.update(interval=2, num_tasks=8)
  config.sft.update(num_steps=min(3, config.sft.num_steps), batch_size=8, limit=100)
  config.checkpoint.save_interval = 1
  return config
