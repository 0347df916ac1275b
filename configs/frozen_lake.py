"""Frozen lake: find the goal, avoid the holes, one move a turn; maps drawn by seed.

A short supervised start on walks of a guide who often errs teaches the form of a move
and a little of the game; GRPO on the maps' own reward does the rest. It is scored on
maps that training never shows.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(algorithm: str = 'grpo') -> ConfigDict:
  config = base.get_config(algorithm)
  config.num_steps = 120
  config.model.random.update(hidden_size=128, num_layers=3)
  if 'kl_coef' in config.algorithm:
    config.algorithm.kl_coef = 0.0  # no reference to stay near: it starts from nothing
  config.batch.update(num_groups=16, max_length=512, buckets=(256, 512))
  config.optimizer.update(learning_rate=5e-4, warmup_steps=5, b2=0.98)
  config.env.lake = base.env_section(
    'frozen_lake',
    max_steps=10,
    max_tokens_per_step=4,
    env_config={'split': 'train'},
  )
  config.eval.update(every=60, num_tasks=200)
  config.sft.path = 'generate:frozen_lake(noise=0.3, max_moves=10)'
  config.sft.update(num_steps=150, batch_size=32, limit=4000, warmup_steps=20)
  config.checkpoint.update(every=60, export=True)
  return config
