"""Trains on DeepMath (arXiv 2504.11456), whose answers are compared by algebra.

    python -m launch.train --config=configs/deepmath.py --config.dataset.path=FILE.jsonl

By default it trains a random tiny model for three steps. To train a real model, set
--config.model.checkpoint=FOLDER --config.num_steps=200. Evaluations play every row of
--config.eval.path once, by default of the training file.
"""

from configs import base
from jaxrl.config import Config

END = 'Please reason step by step, and put your final answer within \\boxed{{}}.'


def get_config(algorithm: str = 'grpo') -> Config:
  """Returns the config for DeepMath."""
  config = base.get_config(algorithm)
  config.num_steps = 3
  config.model.random = 'qwen3(vocab_size=2048)'
  config.dataset.columns.question = 'prompt'
  config.dataset.columns.answer = 'ground_truth'
  config.algorithm.group_size = 8
  config.batch.update(num_groups=16, max_length=512)
  config.optimizer.learning_rate = 1e-6
  config.rollout.max_num_seqs = 64
  config.env.deep_math = base.env_section(
    'math',
    turn_template='{observation}\n' + END,
    max_tokens_per_step=128,
    env_config={'grader': 'math'},
  )
  config.eval.update(interval=10, num_tasks=-1)
  config.checkpoint.update(save_interval=10, export=True)
  return config
