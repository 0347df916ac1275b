"""Trains on GSM8K, grade-school word problems with `#### answer` (arXiv 2110.14168).

    python -m launch.train --config=configs/gsm8k.py --config.dataset.path=train.jsonl

By default it trains a random tiny model for three steps, to see data, graders and
report at work. To train a real model, set --config.model.checkpoint=FOLDER of a Qwen3
and --config.num_steps=200 on a suitable machine. The test set is test.jsonl in the same
folder, or --config.eval.path.
"""

from configs import base
from jaxrl.config import Config

PROMPT = '{observation}\nThink step by step and end with the answer alone after ####.'


def get_config(algorithm: str = 'grpo') -> Config:
  """Returns the config for GSM8K."""
  config = base.get_config(algorithm)
  config.num_steps = 3
  config.model.random = 'qwen3(vocab_size=2048)'
  config.batch.update(num_groups=8, max_length=512)
  config.optimizer.learning_rate = 1e-6
  config.env.gsm8k = base.env_section(
    'math', turn_template=PROMPT, max_tokens_per_step=128
  )
  config.eval.update(interval=50, num_tasks=64)
  config.dataset.columns.solution = 'answer'
  config.checkpoint.update(save_interval=50, export=True)
  return config
