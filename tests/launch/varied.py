"""The debug config in an environment where every group has something to learn from."""

import pathlib

from configs import base, debug

WORDS = pathlib.Path(__file__).with_name('words.py')


def get_config(algorithm='grpo'):
  config = debug.get_config(algorithm)
  env = base.env_section(f'{WORDS}:Words', max_tokens_per_step=16)
  config.env.arithmetic = env
  return config
