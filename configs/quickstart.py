"""Trains a model from scratch to solve word problems, on a laptop, in minutes.

A short supervised start teaches a small random model to work problems out, from a
careless teacher who takes most losses for gains. GRPO then rewards right answers only,
and the model learns which of the ways it was shown is right. It is scored on problems
that it has never seen.
"""

from configs import base
from jaxrl.algorithms import registry
from jaxrl.config import Config

KINDS = ('add', 'sub', 'add_sub', 'sub_add')
FORMS = {'preference': 'pairs', 'text': 'texts'}  # of problems, by what is learned from
MISREAD = {'sub': 0.7, 'sub_add': 0.7, 'add_sub': 0.3}  # wrong shares of the lessons


def get_config(algorithm: str = 'grpo') -> Config:
  """Returns the config of the quickstart, for any algorithm."""
  config = base.get_config(algorithm)
  config.num_steps = 60
  config.model.random = 'qwen3(num_layers=3)'
  problems = f'kinds={KINDS}, max_number=15'
  data_format = registry.make(algorithm).data_format
  form = FORMS.get(data_format, 'worked')
  config.dataset.path = f'generate:arithmetic({problems}, form={form!r})'
  config.sft.path = f'generate:arithmetic({problems}, misread_share={MISREAD})'
  config.dataset.limit = 10_000
  if algorithm == 'grpo':  # others run as their papers have them
    config.algorithm.kl_coef = 0.0  # no reference to stay near: it starts from nothing
  config.batch.update(num_groups=16, max_length=64)
  config.optimizer.update(learning_rate=1e-4, warmup_steps=5, name='adamw(b2=.98)')
  config.rollout.update(max_num_seqs=64)
  config.env.arithmetic = base.env_section('math', max_tokens_per_step=32)
  config.eval.update(interval=20, num_tasks=500)
  config.sft.update(num_steps=600, batch_size=64, learning_rate=2e-3, warmup_steps=30)
  if data_format in ('messages', 'text'):  # supervised as a whole: no start is needed
    config.num_steps, config.sft.num_steps = 600, 0
    config.batch.num_groups = 64
    config.optimizer.update(learning_rate=2e-3, warmup_steps=30, lr_schedule='cosine')
  elif data_format == 'preference' and 'beta' in config.algorithm:
    config.algorithm.beta = 0.5  # at .1 so small a model is soon far from its start
  config.checkpoint.update(save_interval=20, export=True)
  return config
