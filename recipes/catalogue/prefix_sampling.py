"""Compares GRPO with and without turns that are replayed, on maps that come again."""

from jaxrl.config import Config
from recipes.recipe import Arm, Goal, Panel, Recipe
from recipes.tasks import lake

ORDER = 4
GOAL = 0.4
RECIPE = Recipe(
  title='Prefix sampling',
  question='Where most groups fail or pass as a whole, does it save tokens to go on '
  'from turns of earlier games, so that about half of a group reach the goal?',
  arms={
    'GRPO': Arm(),
    'with prefixes': Arm(
      changes={'env.lake.prefixes': 'prefix_sampling(low=.4, high=.6)'}
    ),
    "with the authors' ratios": Arm(changes={'env.lake.prefixes': 'prefix_ratios()'}),
  },
  panels=(
    Panel(
      'eval/lake/mean',
      'Share of goals on new maps, mean of 3 evaluations',
      window=3,
      over_tokens=True,
      goal=GOAL,
    ),
    Panel(
      'reward/groups_without_spread',
      'Share of groups that teach nothing, mean of 5 steps',
      window=5,
    ),
    Panel(
      'prefix/pass_rate',
      'Share of goals after a prefix, mean of 5 steps',
      window=5,
      goal=0.5,
    ),
  ),
  columns={'new maps': 'eval/lake/mean'},
  bases=('lake',),
  goal=Goal('eval/lake/mean', GOAL, window=3),
)


def get_config(algorithm: str = 'grpo') -> Config:
  """Returns the config of a run."""
  config = lake.get_config(algorithm)
  config.num_steps = 20
  config.env.lake.num_seeds = 16  # two steps meet every map
  config.eval.update(interval=2, num_tasks=128, temperature=1.0)
  return config
