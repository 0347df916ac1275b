"""Compares Muon with AdamW as the optimizer of GRPO."""

from jaxrl.config import Config
from recipes.recipe import Arm, Recipe
from recipes.tasks import sums


def _arm(learning_rate: float, name: str) -> Arm:
  changes = {'optimizer.learning_rate': learning_rate, 'optimizer.name': name}
  return Arm(changes=changes)


ADAMW = 'adamw(b2=.98)'
ORDER = 16
RECIPE = Recipe(
  title='Muon against AdamW',
  question='Does RL go faster with Muon on the matrices of layers, and at which '
  'learning rate?',
  arms={
    'AdamW at 3e-4': _arm(3e-4, ADAMW),
    'AdamW at 1e-3': _arm(1e-3, ADAMW),
    'Muon at 3e-4': _arm(3e-4, 'muon()'),
    'Muon at 1e-3': _arm(1e-3, 'muon()'),
  },
  panels=sums.PANELS,
  columns=sums.COLUMNS,
)


def get_config(algorithm: str = 'grpo') -> Config:
  """Returns the config of a run."""
  return sums.get_config(algorithm)
