"""Trains a model that sees: which square is red, and how many dots are there?

Pictures are drawn by seed. A short supervised start shows a small random model, vision
tower included, right answers, and ends while many of its own are wrong. GRPO then
rewards right answers. Each question is an environment tag, so that evaluation tells
them apart. The model is scored on pictures that training never shows.
"""

from configs import base
from jaxrl.algorithms import registry
from jaxrl.config import Config

QUIZ = {'side': 2, 'cell_size': 16}  # answers are from 1 to 4: a guess is right in 1/4
QUESTIONS = ('red', 'dots')
MODEL = (
  'qwen3_vl(num_layers=2, tower_layers=2, tower_width=64, tower_mlp=128, '
  'deepstack_layers=(0,), num_positions=16)'
)


def get_config(algorithm: str = 'grpo') -> Config:
  """Returns the config for the picture quiz."""
  config = base.get_config(algorithm)
  config.num_steps = 200
  config.model.update(random=MODEL, vision='full')
  if 'kl_coef' in config.algorithm:
    config.algorithm.kl_coef = 0.0  # no reference to stay near: it starts from nothing
  config.batch.update(num_groups=64, max_length=32)
  config.optimizer.update(learning_rate=3e-4, lr_schedule='linear', warmup_steps=5)
  config.optimizer.name = 'adamw(b2=.98)'
  config.rollout.update(max_num_seqs=64, engine='jax(decode_steps=2)')
  for question in QUESTIONS:
    config.env[question] = base.env_section(
      'picture_quiz',
      max_tokens_per_step=2,  # a digit and the end of the turn
      env_config={**QUIZ, 'questions': question, 'split': 'train'},
    )
  config.eval.update(interval=20, num_tasks=200)  # of each question
  options = {**QUIZ, 'questions': ','.join(QUESTIONS)}
  guide = ', '.join(f'{name}={value!r}' for name, value in options.items())
  config.sft.path = f'generate:picture_quiz({guide})'
  if registry.make(algorithm).data_format != 'rollout':  # games need no rows
    config.dataset.path = config.sft.path
  config.sft.update(num_steps=120, batch_size=32, limit=4000, warmup_steps=20)
  config.sft.learning_rate = 1e-3
  config.checkpoint.update(save_interval=20, export=True)
  return config
