"""A game of several turns for a model that can do nothing, and its config.

Each reply is heads or tails; the first tails loses, and four heads win.
"""

import pathlib
import zlib

from configs import base, debug

TURNS = 4


class Coins:
  uses_dataset = False

  def reset(self, *, seed, options=None):
    self.seed, self.turn = seed, 0
    return f'{seed % 7}', {}

  def step(self, action):
    self.turn += 1
    is_heads = zlib.crc32(f'{self.seed} {self.turn} {action}'.encode()) % 10 < 6
    has_won = is_heads and self.turn == TURNS
    ended = has_won or not is_heads
    info = {'metrics': {'accuracy': float(has_won)}}
    return f'{self.turn}', float(has_won), ended, False, info


def get_config(algorithm='grpo'):
  config = debug.get_config(algorithm)
  config.sft.num_steps = 0
  config.num_steps = 6
  config.batch.update(num_groups=3, max_length=96)
  config.algorithm.group_size = 8
  config.env = {}
  config.env.coins = base.env_section(
    f'{pathlib.Path(__file__)}:Coins',
    max_steps=TURNS,
    max_tokens_per_step=2,
    num_seeds=3,
  )
  config.eval.update(interval=3, num_tasks=4)
  config.checkpoint.save_interval = 2
  return config
