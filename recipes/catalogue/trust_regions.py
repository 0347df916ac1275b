"""Compares limits on how far a batch's updates may move the policy."""

from jaxrl.config import Config
from recipes.recipe import Arm, Recipe
from recipes.tasks import sums

ORDER = 13
RECIPE = Recipe(
  title='Trust regions',
  question='A batch is used for eight updates. Does it matter how they are kept near '
  "the policy that sampled it: by PPO's clip, by DPPO's limits on probabilities, or by "
  "GMPO's and VESPO's weights of whole replies?",
  arms={
    'GRPO (clipped ratios)': Arm('grpo'),
    'DPPO (total variation)': Arm('dppo_tv'),
    'GMPO': Arm('gmpo'),
    'VESPO': Arm('vespo'),
  },
  panels=sums.PANELS,
  columns=sums.COLUMNS,
)


def get_config(algorithm: str = 'dppo_tv') -> Config:
  """Returns the config of a run: each algorithm at its defaults."""
  config = sums.get_config(algorithm)
  config.num_steps = 40
  config.batch.num_minibatches = 8
  config.optimizer.learning_rate = 3e-4
  return config
