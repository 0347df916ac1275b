r"""Trains Qwen3-1.7B on GSM8K with vLLM's rollouts (arXiv 2505.09388).

    python -m launch.train --config=configs/qwen3_1_7b.py \
      --config.model.checkpoint=FOLDER --config.dataset.path=train.jsonl

It is like configs/qwen3_0_6b.py, but on a slice of TPUs: parameters and moments are
split into sixteen shards.
"""

from configs import _qwen3
from jaxrl.config import Config

TOPOLOGY = 'v5e:4x4'  # of the learner, which `launch.plan` plans for


def get_config(algorithm: str = 'grpo') -> Config:
  """Returns the config for Qwen3-1.7B."""
  config = _qwen3.gsm8k('Qwen3-1.7B', algorithm)
  config.batch.num_micro_batches = 8
  config.mesh.update(data=1, fsdp=16)
  return config
