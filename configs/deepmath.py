r"""DeepMath (arXiv 2504.11456): questions whose answers are compared by algebra.

    python -m launch.train --config=configs/deepmath.py --config.dataset.path=FILE.jsonl

As it is: three steps of a random tiny model. For real: --config.model.checkpoint=FOLDER
--config.num_steps=200. Evaluations play every row of --config.eval.path once, by
default of the same file.
"""

from configs import base
from jaxrl.config import Config

END = 'Please reason step by step, and put your final answer within \\boxed{{}}.'


def get_config(algorithm: str = 'grpo') -> Config:
  config = base.get_config(algorithm)
  config.num_steps = 3
  config.model.random.update(vocab_size=2048)
  config.dataset.update(question_key='prompt', answer_key='ground_truth')
  config.algorithm.group_size = 8
  config.batch.update(num_groups=16, max_length=512)
  config.optimizer.learning_rate = 1e-6
  config.rollout.num_slots = 64
  config.env.deep_math = base.env_section(
    'math',
    turn_template='{observation}\n' + END,
    max_tokens_per_step=128,
    env_config={'grader': 'math'},
  )
  config.eval.update(every=10, num_tasks=-1)
  config.checkpoint.update(every=10, export=True)
  return config
