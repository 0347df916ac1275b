"""Compares rewards as an objective with a policy that is its own teacher."""

from jaxrl.config import Config
from recipes.recipe import Arm, Recipe
from recipes.tasks import sums

ORDER = 17
RECIPE = Recipe(
  title='Self-distillation',
  question='Does a tiny model learn from itself, if its teacher is shown a reply that '
  'succeeded (SDPO)?',
  arms={
    'GRPO': Arm('grpo'),
    'SDPO': Arm('sdpo'),
    'SDPO, forward KL': Arm('sdpo', {'algorithm.alpha': 0.0}),
  },
  panels=sums.PANELS,
  columns=sums.COLUMNS,
)


def get_config(algorithm: str = 'sdpo') -> Config:
  """Returns the config of a run."""
  return sums.get_config(algorithm)
