"""Trains on frozen lake: find the goal, avoid the holes, one move a turn.

Maps are drawn by seed. A short supervised start shows a small random model the walks of
a hasty guide, who mostly heads right and down without looking at the holes. GRPO then
rewards reaching the goal, and the model learns to look. It is scored on maps that
training never shows.
"""

from configs import base
from jaxrl.algorithms import registry
from jaxrl.config import Config

LAKE = {'map_size': 4, 'frozen': 0.65, 'view': 'around'}
GUIDE = {**LAKE, 'haste': 0.65, 'noise': 0.05, 'max_moves': 8}


def get_config(algorithm: str = 'grpo') -> Config:
  """Returns the config for frozen lake."""
  config = base.get_config(algorithm)
  config.num_steps = 60
  config.model.random = 'qwen3(num_layers=3)'
  if 'kl_coef' in config.algorithm:
    config.algorithm.kl_coef = 0.0  # no reference to stay near: it starts from nothing
  config.batch.update(num_groups=16, max_length=176)  # eight moves
  config.optimizer.update(learning_rate=1e-4, warmup_steps=5, name='adamw(b2=.98)')
  config.rollout.update(max_num_seqs=64, engine='jax(decode_steps=2)')
  config.env.lake = base.env_section(
    'frozen_lake',
    max_steps=8,
    max_tokens_per_step=2,  # a direction and the end of the turn
    env_config={**LAKE, 'split': 'train'},
  )
  config.eval.update(interval=20, num_tasks=280)  # some maps come twice: 200 differ
  guide = ', '.join(f'{name}={value!r}' for name, value in GUIDE.items())
  config.sft.path = f'generate:frozen_lake({guide})'
  if registry.make(algorithm).data_format != 'rollout':  # games need no rows
    config.dataset.path = config.sft.path
  config.sft.update(num_steps=100, batch_size=32, limit=4000, warmup_steps=20)
  config.sft.learning_rate = 2e-3
  config.checkpoint.update(save_interval=20, export=True)
  return config
