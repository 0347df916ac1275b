r"""Generates trajectories into a MaxCompute table: mathematics, every question once.

    python -m launch.rollout --config=configs/odps_rollout.py \
      --config.dataset.path=FILE.jsonl --config.model.checkpoint=FOLDER \
      --config.trajectory_dump.path=odps://PROJECT/tables/TABLE/ds=NAME

It needs `pip install -e '.[odps]'`, a table with the columns below, and ODPS_ENDPOINT,
ODPS_ACCESS_ID and ODPS_ACCESS_KEY in the environment; see docs/synthesis.md.
"""

from ml_collections import ConfigDict

from configs import deepmath, swe_rollout
from jaxrl.config import Config


def get_config(algorithm: str = 'grpo') -> Config:
  """Returns the config for generating trajectories into a MaxCompute table."""
  config = deepmath.get_config(algorithm)
  path = 'odps://odps_project/tables/table_name/ds=model_name'
  config.trajectory_dump = ConfigDict({'path': path, 'columns': swe_rollout.COLUMNS})
  return config
