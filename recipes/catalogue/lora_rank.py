"""Compares ranks of LoRA at the learning rate of rank 8, and a high rank at less."""

from jaxrl.config import Config
from recipes.catalogue.adapters import lora_arm
from recipes.recipe import Recipe
from recipes.tasks import sums

ORDER = 8
RECIPE = Recipe(
  title='The rank of LoRA',
  question='How much does the rank of LoRA matter, and does one learning rate suit '
  'all ranks?',
  arms={
    'rank 2, 3e-3': lora_arm(2, 3e-3),
    'rank 8, 3e-3': lora_arm(8, 3e-3),
    'rank 32, 3e-3': lora_arm(32, 3e-3),
    'rank 32, 1e-3': lora_arm(32, 1e-3),
  },
  panels=sums.PANELS,
  columns=sums.COLUMNS,
)


def get_config(algorithm: str = 'grpo') -> Config:
  """Returns the config of a run."""
  return sums.get_config(algorithm)
