"""Compares learning from rewards with learning from a teacher that had rewards."""

from jaxrl.config import Config
from recipes.recipe import Arm, Recipe, base_folder
from recipes.tasks import sums

TEACHER = {'teacher.checkpoint': base_folder('teacher')}

ORDER = 9
RECIPE = Recipe(
  title='Distillation against RL',
  question='If a good teacher is at hand, is it quicker to learn from it than from '
  'rewards?',
  arms={
    'GRPO, from rewards': Arm('grpo'),
    'on-policy distillation': Arm('on_policy_distill', TEACHER),
    'JSD, on-policy': Arm('jsd', TEACHER),
  },
  panels=sums.PANELS,
  columns=sums.COLUMNS,
  bases=('sums', 'teacher'),
)


def get_config(algorithm: str = 'on_policy_distill') -> Config:
  """Returns the config of a run."""
  return sums.get_config(algorithm)
