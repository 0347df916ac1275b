"""Compares ways to say how far a stale rollout's update may go."""

from jaxrl.config import Config
from recipes.recipe import Arm, Recipe
from recipes.tasks import sums

TWO_AHEAD = {'rollout.async_ratio': 2}
ORDER = 15
RECIPE = Recipe(
  title='A proximal policy without a forward pass',
  question='Rollouts run two steps ahead. A-3PO takes the policy to stay near from the '
  'age of each token, instead of scoring the batch. What does that save, and cost?',
  arms={
    'scored before each update (TIS)': Arm(
      changes={**TWO_AHEAD, 'algorithm.correction': 'tis'}, is_exact=False
    ),
    'A-3PO': Arm('a3po', TWO_AHEAD, is_exact=False),
  },
  panels=sums.PANELS,
  columns={**sums.COLUMNS, 'scoring, s': 'time/prepare', 'update, s': 'time/train'},
)


def get_config(algorithm: str = 'a3po') -> Config:
  """Returns the config of a run."""
  return sums.get_config(algorithm)
