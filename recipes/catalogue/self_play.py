"""Compares what a return is compared with when a model plays with itself."""

from jaxrl.config import Config
from recipes.recipe import Arm, Recipe
from recipes.tasks import poker

ORDER = 12
RECIPE = Recipe(
  title='Self-play in Kuhn poker',
  question='Does a model that plays poker with itself become harder to beat, and does '
  'it matter what a return is compared with?',
  arms={
    'RAE': Arm('rae'),
    'GRPO': Arm('grpo'),
  },
  panels=poker.PANELS,
  columns=poker.COLUMNS,
  bases=('poker',),
)


def get_config(algorithm: str = 'rae') -> Config:
  """Returns the config of a run."""
  return poker.get_config(algorithm)
