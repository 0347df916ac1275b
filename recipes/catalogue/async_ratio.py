"""Compares how far rollouts run ahead, with and without a correction for it."""

from jaxrl.config import Config
from recipes.recipe import Arm, Recipe
from recipes.tasks import sums


def _arm(ratio: int, correction: str) -> Arm:
  changes = {'rollout.async_ratio': ratio, 'algorithm.correction': correction}
  return Arm(changes=changes, is_exact=False)


ORDER = 6
RECIPE = Recipe(
  title='Asynchronous rollouts',
  question='What do rollouts lose that run 1, 2 or 4 steps ahead, and does truncated '
  'importance sampling (TIS) win it back?',
  arms={
    'synchronous': Arm(),
    **{f'{n} ahead, TIS': _arm(n, 'tis') for n in (1, 2, 4)},
    **{f'{n} ahead, no correction': _arm(n, 'none') for n in (2, 4)},
  },
  panels=sums.PANELS,
  columns=sums.COLUMNS,
)


def get_config(algorithm: str = 'grpo') -> Config:
  """Returns the config of a run."""
  return sums.get_config(algorithm)
