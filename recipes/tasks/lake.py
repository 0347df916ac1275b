"""Frozen lake on 4 × 4 maps, for a tiny model that was shown a hasty guide's walks.

The guide heads right and down without looking at the holes. Runs start from the base
that learned from it and are rewarded for reaching the goal. They are scored on maps
that training never shows.

    python -m launch.train --config=recipes/tasks/lake.py:sft
"""

from configs import base
from jaxrl.algorithms import registry
from jaxrl.config import Config
from recipes.tasks import sums

LAKE = {'map_size': 4, 'frozen': 0.65, 'view': 'around'}
GUIDE = "map_size=4, frozen=.65, view='around', haste=.65, noise=.05, max_moves=8"


def get_config(algorithm: str = 'grpo') -> Config:
  """Returns the config of a run, or of the base for `sft`."""
  config = base.get_config(algorithm)
  config.batch.max_length = 176  # eight moves
  config.env.lake = base.env_section(
    'frozen_lake',
    max_steps=8,
    max_tokens_per_step=2,  # a direction and the end of the turn
    env_config={**LAKE, 'split': 'train'},
  )
  if registry.make(algorithm).data_format == 'messages':
    config.dataset.path = f'generate:frozen_lake({GUIDE})'
    config.dataset.limit = 2000
    sums.set_up_base(config, num_steps=100)
    return config
  sums.set_up_run(config, 'lake', num_steps=24, learning_rate=3e-4)
  config.rollout.engine = 'jax(decode_steps=2)'
  config.eval.update(interval=8, num_tasks=64)
  return config
