"""Compares GRPO with six of its relatives on one task and budget."""

from jaxrl.config import Config
from recipes.recipe import Arm, Recipe
from recipes.tasks import sums

ORDER = 1
RECIPE = Recipe(
  title='GRPO and its relatives',
  question='Which of GRPO, Dr. GRPO, DAPO, GSPO, CISPO, RLOO and REINFORCE++ learns '
  'fastest from the same number of samples?',
  arms={
    'GRPO': Arm('grpo'),
    'Dr. GRPO': Arm('drgrpo'),
    'DAPO': Arm('dapo'),
    'GSPO': Arm('gspo'),
    'CISPO': Arm('cispo'),
    'RLOO': Arm('rloo'),
    'REINFORCE++': Arm('reinforce_plus_plus'),
  },
  panels=sums.PANELS,
  columns=sums.COLUMNS,
)


def get_config(algorithm: str = 'grpo') -> Config:
  """Returns the config of a run: an algorithm at its defaults, but without KL."""
  config = sums.get_config(algorithm)
  config.batch.num_minibatches = 4  # in one update per batch all clips are idle
  config.optimizer.learning_rate = 1e-4
  return config
