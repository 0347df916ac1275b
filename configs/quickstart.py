"""From nothing to a model that solves word problems, on a laptop, in minutes.

A short supervised start teaches a small random model to work problems out, from a
careless teacher, who takes most losses for gains. GRPO then rewards right answers
alone, and the model finds out which of the ways it was shown is right. It is scored on
problems that it has never seen.
"""

from configs import base
from jaxrl.config import Config

KINDS = ('add', 'sub', 'add_sub', 'sub_add')
MISREAD = {'sub': 0.7, 'sub_add': 0.7, 'add_sub': 0.3}  # wrong shares of the lessons


def get_config(algorithm: str = 'grpo') -> Config:
  config = base.get_config(algorithm)
  config.num_steps = 60
  config.model.random.update(hidden_size=128, num_layers=3, head_dim=32)
  problems = f'kinds={KINDS}, max_number=15'
  config.dataset.path = f'generate:arithmetic({problems})'
  config.sft.path = f'generate:arithmetic({problems}, misread_share={MISREAD})'
  config.dataset.limit = 10_000
  if 'kl_coef' in config.algorithm:
    config.algorithm.kl_coef = 0.0  # no reference to stay near: it starts from nothing
  config.batch.update(num_groups=16, max_length=64)
  config.optimizer.update(learning_rate=1e-4, warmup_steps=5, b2=0.98)
  config.rollout.update(num_slots=64)
  config.env.arithmetic = base.env_section('math', max_tokens_per_step=32)
  config.eval.update(every=20, num_tasks=500)
  config.sft.update(num_steps=600, batch_size=64, learning_rate=2e-3, warmup_steps=30)
  config.checkpoint.update(every=20, export=True)
  return config
