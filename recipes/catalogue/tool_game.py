"""Compares a game without its tool, with it, and with a cost for each call of it."""

from jaxrl.config import Config
from recipes.recipe import Arm, Panel, Recipe
from recipes.tasks import boxes

ORDER = 10
TAGS = ('open', 'closed')
RECIPE = Recipe(
  title='A game with a tool',
  question='Does a model learn when to call a tool from the reward of right answers '
  'alone, and what does a cost for each call change?',
  arms={
    'calls are free': Arm(),
    'a call costs 0.2': Arm(
      changes={f'env.{tag}.env_config.call_reward': -0.2 for tag in TAGS}
    ),
    'no tool': Arm(changes={f'env.{tag}.env_config.has_tool': False for tag in TAGS}),
  },
  panels=(
    Panel('eval/closed/right', 'Right answers for closed boxes'),
    Panel('eval/closed/calls', 'Calls in a game with a closed box'),
    Panel('eval/open/calls', 'Calls in a game with an open box'),
  ),
  columns={
    'right, closed': 'eval/closed/right',
    'right, open': 'eval/open/right',
    'calls, closed': 'eval/closed/calls',
    'calls, open': 'eval/open/calls',
  },
  bases=('boxes',),
)


def get_config(algorithm: str = 'grpo') -> Config:
  """Returns the config of a run."""
  return boxes.get_config(algorithm)
