"""Compares group-relative advantages with MaxRL's and the optimal token baseline."""

from jaxrl.config import Config
from recipes.recipe import Arm, Recipe
from recipes.tasks import sums

ORDER = 14
RECIPE = Recipe(
  title='MaxRL and the optimal token baseline',
  question='MaxRL lets a rare success weigh more, and the optimal token baseline aims '
  'at gradients of less variance. Does either learn faster than GRPO?',
  arms={
    'GRPO': Arm('grpo'),
    'MaxRL': Arm('maxrl'),
    'optimal token baseline': Arm('optimal_token_baseline'),
  },
  panels=sums.PANELS,
  columns=sums.COLUMNS,
)


def get_config(algorithm: str = 'maxrl') -> Config:
  """Returns the config of a run: each algorithm at its defaults."""
  return sums.get_config(algorithm)
