"""The debug config, whose tiny model plays Kuhn poker with itself."""

from configs import base, debug
from jaxrl.envs.games.kuhn_poker_env import MOVES, KuhnPokerEnv


class LenientPoker(KuhnPokerEnv):
  """Takes any reply for a move: a random model hardly writes one."""

  def step(self, action):
    return super().step(MOVES['pb'[sum(map(ord, action)) % 2]])


def get_config(algorithm='rae'):
  config = debug.get_config(algorithm)
  options = {'show_rules': False}
  config.env = {
    'kuhn': base.env_section(
      'tests.launch.poker:LenientPoker',
      max_steps=3,
      max_tokens_per_step=2,
      env_config=options,
    ),
    'probe': base.env_section(
      'tests.launch.poker:LenientPoker',
      weight=0.0,
      max_tokens_per_step=2,
      env_config={**options, 'probe': True},
    ),
  }
  config.sft.num_steps = 0
  config.num_steps = 2
  config.batch.max_length = 256
  config.eval.sets.probe = base.eval_set(
    tag='probe', num_tasks=12, group_size=2, temperature=1.0
  )
  return config
