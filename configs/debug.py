"""Runs every part of the quickstart at its smallest size, in seconds.

The answer to each problem is 1 or 2, so a model that has hardly learned to write is
right now and then, and the reward moves in the few steps of a run.
"""

from configs import base, quickstart
from jaxrl.algorithms import registry
from jaxrl.config import Config

PROBLEMS = "kinds=('sub',), max_number=2, size=160"
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
  data_format = registry.make(algorithm).data_format
  form = quickstart.FORMS.get(data_format, 'worked')
  config.dataset.path = f'generate:arithmetic({PROBLEMS}, form={form!r})'
  config.dataset.limit = 100
  config.batch.num_groups = 2
  config.rollout.max_num_seqs = 16
  config.eval.update(interval=2, num_tasks=8)
  config.optimizer.update(learning_rate=1e-2, warmup_steps=0)
  config.sft.update(
    path=f'generate:arithmetic({PROBLEMS})',
    num_steps=min(3, config.sft.num_steps),
    batch_size=8,
    limit=100,
    learning_rate=0.1,
    warmup_steps=0,
  )
  config.checkpoint.save_interval = 1
  return config
