"""Kuhn poker for a tiny model that was shown the games of timid players.

The base learns from players who bet too rarely, above all after a bet. Runs play both
sides. An evaluation samples the policy's move at each of the twelve information sets,
and computes how much a perfect player would win from it.

    python -m launch.train --config=recipes/tasks/poker.py:sft
"""

from typing import Any

import numpy as np

from configs import base
from jaxrl.algorithms import registry
from jaxrl.config import Config
from jaxrl.envs.games.kuhn_poker_env import CARDS, MOVES, KuhnPokerEnv
from recipes.recipe import Panel
from recipes.tasks import sums

# How often a timid player bets with J, Q and K: after a bet, and else.
CALLS, OPENS = (0.05, 0.15, 0.4), (0.2, 0.4, 0.7)
PANELS = (
  Panel('eval/probe/exploitability', 'Exploitability'),
  Panel('policy/entropy', 'Entropy of the policy, mean of 5 steps', window=5),
)
COLUMNS = {
  'exploitability': 'eval/probe/exploitability',
  'entropy': 'policy/entropy',
}


def lessons(
  split: str = 'train', *, size: int = 2000, seed: int = 0
) -> list[dict[str, Any]]:
  """Generates the conversations of two timid players.

  Args:
    split: Seeds the generator.
    size: The number of games; each gives two conversations.
    seed: Seeds the generator too.

  Returns:
    Rows with `messages`.
  """
  rng = np.random.default_rng([seed, int(split == 'test')])
  env, rows = KuhnPokerEnv(show_rules=False), []
  for _ in range(size):
    observation, info = env.reset(seed=int(rng.integers(2**31)))
    players: tuple[list[dict[str, Any]], ...] = ([], [])
    done = False
    while not done:
      card = CARDS.index(observation[len('Your card is ')])
      chances = CALLS if 'player bets' in observation else OPENS
      move = MOVES['b' if rng.random() < chances[card] else 'p']
      players[info['role']].extend(
        [
          {'role': 'user', 'content': observation},
          {'role': 'assistant', 'content': move},
        ]
      )
      observation, _, done, _, info = env.step(move)
    rows += [{'messages': messages} for messages in players]
  return rows


def get_config(algorithm: str = 'rae') -> Config:
  """Returns the config of a run, or of the base for `sft`."""
  config = base.get_config(algorithm)
  config.batch.update(max_length=56, length_buckets=(56,))  # two turns
  config.env.kuhn = base.env_section(
    'kuhn_poker',
    max_steps=3,
    max_tokens_per_step=4,
    env_config={'show_rules': False},
  )
  if registry.make(algorithm).data_format == 'messages':
    config.dataset.path = 'generate:recipes.tasks.poker:lessons()'
    config.dataset.limit = 2000
    sums.set_up_base(config, num_steps=200)
    return config
  sums.set_up_run(config, 'poker', num_steps=40, learning_rate=6e-4)
  # Moves that are always the same are easy to beat, and players who follow each other
  # go round in circles: so their replies stay random, and they learn ever more slowly.
  config.algorithm.entropy_loss = 'entropy_loss(coef=.05)'
  config.optimizer.lr_schedule = 'cosine(decay_steps=40, final_fraction=.1)'
  config.env.probe = base.env_section(
    'kuhn_poker',
    weight=0.0,  # never trained on
    max_tokens_per_step=4,
    env_config={'show_rules': False, 'probe': True},
  )
  config.eval.interval = 10
  config.eval.sets.probe = base.eval_set(
    tag='probe', num_tasks=12, group_size=128, temperature=1.0
  )
  return config
