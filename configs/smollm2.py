"""Teaches SmolLM2-135M-Instruct to solve word problems by GRPO, on two CPU cores.

    python -m launch.train --config=configs/smollm2.py

The checkpoint comes from the Hub, with its own tokenizer and chat template; a folder
does as well: --config.model.checkpoint=FOLDER. The problems have one sum or difference
of numbers up to 20, and a reply has 24 tokens. As it comes, the model solves about one
in ten of them. Rewards go to right last numbers alone, and the evaluation asks problems
that training never does. Adapters are trained; all weights are, to the same end, with
--config.model.lora= --config.optimizer.learning_rate=1e-5.
docs/recipes/real_model.md shows the curves.
"""

from configs import base
from jaxrl.config import Config

KINDS = ('add', 'sub')
PROMPT = '{observation} Answer with the number alone.'


def get_config(algorithm: str = 'grpo') -> Config:
  """Returns the config for SmolLM2-135M-Instruct."""
  config = base.get_config(algorithm)
  config.num_steps = 20
  config.model.checkpoint = 'HuggingFaceTB/SmolLM2-135M-Instruct'
  config.model.lora = 'lora(rank=16)'
  config.dataset.path = f'generate:arithmetic(kinds={KINDS}, max_number=20)'
  config.dataset.limit = 4000
  if 'kl_coef' in config.algorithm:
    config.algorithm.kl_coef = 0.0  # so few steps need no reference to stay near
  config.batch.update(num_groups=6, max_length=96)
  # Samples of a group share their prompt, which is longer than the replies.
  config.batch.packing = 'first_fit(tokens=256)'
  config.optimizer.update(learning_rate=3e-4, warmup_steps=3, name='adamw(b2=.98)')
  config.rollout.update(max_num_seqs=64, temperature=0.6)
  config.env.arithmetic = base.env_section(
    'math', turn_template=PROMPT, max_tokens_per_step=24
  )
  config.eval.update(interval=10, num_tasks=128)
  config.checkpoint.export = True
  return config
