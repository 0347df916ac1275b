r"""Trains Qwen3-8B on GSM8K with vLLM's rollouts (arXiv 2505.09388).

    python -m launch.train --config=configs/qwen3_8b.py \
      --config.model.checkpoint=FOLDER --config.dataset.path=train.jsonl

It is like configs/qwen3_0_6b.py, but the learner has a whole node of GPUs and the
engines have another.
"""

from configs import _qwen3
from jaxrl.config import Config

TOPOLOGY = 'h200:8'  # of the learner, which `launch.plan` plans for


def get_config(algorithm: str = 'grpo') -> Config:
  """Returns the config for Qwen3-8B."""
  config = _qwen3.gsm8k('Qwen3-8B', algorithm)
  config.batch.num_micro_batches = 16
  config.mesh.update(data=1, fsdp=8)
  return config
