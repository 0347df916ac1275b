"""Compares LoRA adapters with training all weights."""

from jaxrl.config import Config
from recipes.recipe import Arm, Recipe
from recipes.tasks import sums


def lora_arm(rank: int, learning_rate: float) -> Arm:
  """Returns an arm that trains adapters.

  Args:
    rank: The adapters' rank; alpha is twice as much.
    learning_rate: The learning rate.
  """
  changes = {
    'model.lora': f'lora(rank={rank}, alpha={2 * rank})',
    'optimizer.learning_rate': learning_rate,
  }
  return Arm(changes=changes)


ORDER = 8
RECIPE = Recipe(
  title='LoRA against full fine-tuning',
  question='Does LoRA reach what full fine-tuning reaches, and at which learning rate?',
  arms={
    'all weights, 3e-4': Arm(),
    'LoRA, rank 8, 3e-4': lora_arm(8, 3e-4),
    'LoRA, rank 8, 3e-3': lora_arm(8, 3e-3),
  },
  panels=sums.PANELS,
  columns=sums.COLUMNS,
)


def get_config(algorithm: str = 'grpo') -> Config:
  """Returns the config of a run."""
  return sums.get_config(algorithm)
