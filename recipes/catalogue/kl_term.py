"""Compares GRPO without a KL term to GRPO that stays near the model it began with."""

from jaxrl.config import Config
from recipes.recipe import Arm, Recipe
from recipes.tasks import sums

ORDER = 7
RECIPE = Recipe(
  title='KL on and off',
  question='What does a KL term to the initial model cost, and what does it keep?',
  arms={
    'off': Arm(),
    **{f'{c:g}': Arm(changes={'algorithm.kl_coef': c}) for c in (0.1, 1.0)},
  },
  panels=sums.PANELS,
  columns={
    'reward': 'reward/mean',
    'entropy': 'policy/entropy',
    'KL from the initial model': 'kl/reference',
  },
)


def get_config(algorithm: str = 'grpo') -> Config:
  """Returns the config of a run."""
  return sums.get_config(algorithm)
