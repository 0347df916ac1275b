r"""Generates trajectories of an agent that repairs repositories, every task once.

    python -m launch.rollout --config=configs/swe_rollout.py \
      --config.dataset.path=verified.jsonl \
      --config.env.swe.env_config.repos=FOLDER \
      --config.model.checkpoint=FOLDER \
      --config.trajectory_dump.path=runs/swe/trajectories

verified.jsonl holds rows in SWE-bench Verified's format, and the folder of `repos`
holds clones of their repositories. `--group_size=4` plays each task four times. By
default a random tiny model plays, which shows that all parts work but repairs nothing.
`--check` plays without a model: it finds tasks whose reference solution fails.
"""

from ml_collections import ConfigDict

from configs import base
from jaxrl.config import Config

COLUMNS = (
  ('task_idx', 'bigint'),
  ('model_name', 'string'),
  ('stop_reason', 'string'),
  ('episode_score', 'double'),
  ('mode', 'string'),
  ('save_content', 'string'),
)


def get_config(algorithm: str = 'grpo') -> Config:
  """Returns the config for generating trajectories of repository repairs."""
  config = base.get_config(algorithm)
  config.model.random = 'qwen3(vocab_size=2048)'
  config.dataset.columns.question = 'problem_statement'
  config.dataset.columns.answer = ''
  config.batch.update(num_groups=32, max_length=2048)
  config.rollout.max_num_seqs = 32
  config.env.swe = base.env_section(
    'swe', max_steps=30, max_tokens_per_step=128, max_concurrency=16
  )
  config.trajectory_dump = ConfigDict({'path': '', 'columns': COLUMNS})
  return config
