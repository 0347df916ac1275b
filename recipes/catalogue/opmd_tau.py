"""Compares values of tau, which scales the step that OPMD takes."""

from jaxrl.config import Config
from recipes.recipe import Arm, Recipe
from recipes.tasks import sums

ORDER = 5
RECIPE = Recipe(
  title="OPMD's τ",
  question='How much does the temperature τ of OPMD matter?',
  arms={
    f'τ = {tau:g}': Arm('opmd', {'algorithm.tau': tau}) for tau in (0.1, 1.0, 16.0)
  },
  panels=sums.PANELS,
  columns=sums.COLUMNS,
)


def get_config(algorithm: str = 'opmd') -> Config:
  """Returns the config of a run."""
  return sums.get_config(algorithm)
