"""A run whose episodes are played by an agent through the endpoint."""

from configs import base, debug
from jaxrl.config import Config

CASES = 'tests.rollout.agent_cases'


def get_config(algorithm: str = 'grpo') -> Config:
  config = debug.get_config(algorithm)
  config.num_steps = 2
  config.batch.max_length = 256
  config.sft.num_steps = 0
  config.algorithm.group_size = 4
  config.batch.num_groups = 1
  config.optimizer.update(learning_rate=1e-3, warmup_steps=0)
  config.eval.update(interval=2, num_tasks=2)
  config.checkpoint.update(save_interval=0, export=True)
  del config.env.arithmetic
  config.env.bot = base.env_section(
    'agent',
    max_steps=4,
    max_tokens_per_step=12,
    env_config={'agent': f'{CASES}:with_client'},
  )
  return config
