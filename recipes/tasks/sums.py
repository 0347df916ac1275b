"""Word problems with one sum or difference, for a tiny model that misreads losses.

The base learns from a careless teacher, who takes many losses for gains. Runs start
from its weights and are rewarded for right answers alone. There are so few problems
that a run meets all of them; it shows how fast rewards are learned from, not what the
model makes of new problems.

    python -m launch.train --config=recipes/tasks/sums.py:sft
"""

from configs import base
from jaxrl.algorithms import registry
from jaxrl.config import Config
from recipes.recipe import Panel, base_folder

MODEL = (
  'qwen3(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, '
  'intermediate_size=192, vocab_size=320)'
)
PROBLEMS = "kinds=('add', 'sub'), max_number=6"
LESSONS = "misread_share={'sub': 0.7}"
SAMPLES = 64  # of a training step, in groups of any size
PANELS = (
  Panel('reward/mean', 'Reward in training, mean of 5 steps', window=5),
  Panel('policy/entropy', 'Entropy of the policy, mean of 5 steps', window=5),
)
COLUMNS = {'reward': 'reward/mean', 'entropy': 'policy/entropy'}


def set_up_base(config: Config, num_steps: int) -> None:
  """Sets up a supervised run from random weights, whose result other runs start from.

  Args:
    config: The config to change; its `dataset` has the rows already.
    num_steps: Updates of 32 rows.
  """
  config.model.random = MODEL
  config.num_steps = num_steps
  config.batch.num_groups = 32
  config.optimizer.update(
    learning_rate=3e-3, warmup_steps=20, lr_schedule='cosine', name='adamw(b2=.98)'
  )
  config.checkpoint.export = True


def set_up_run(
  config: Config, task: str, *, num_steps: int, learning_rate: float
) -> None:
  """Sets up a run of GRPO's size that starts from a task's base.

  Args:
    config: The config to change.
    task: The task whose base it starts from.
    num_steps: Steps of `SAMPLES` samples.
    learning_rate: The learning rate.
  """
  config.model.checkpoint = base_folder(task)
  config.num_steps = num_steps
  if 'kl_coef' in config.algorithm:
    config.algorithm.kl_coef = 0.0  # as most recent work does; a recipe compares
  if 'group_size' in config.algorithm:
    config.algorithm.group_size = 8
  config.batch.num_groups = SAMPLES // 8
  config.optimizer.update(
    learning_rate=learning_rate, warmup_steps=2, name='adamw(b2=.98)'
  )
  config.rollout.max_num_seqs = SAMPLES


def get_config(algorithm: str = 'grpo') -> Config:
  """Returns the config of a run, or of the base for `sft`."""
  config = base.get_config(algorithm)
  config.dataset.path = f'generate:arithmetic({PROBLEMS})'
  config.dataset.limit = 2000
  config.batch.max_length = 48
  config.env.sums = base.env_section('math', max_tokens_per_step=16)
  if registry.make(algorithm).data_format == 'messages':
    config.dataset.path = f'generate:arithmetic({PROBLEMS}, {LESSONS})'
    set_up_base(config, num_steps=350)
    return config
  set_up_run(config, 'sums', num_steps=50, learning_rate=3e-4)
  return config
