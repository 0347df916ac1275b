r"""Trains Qwen3-32B on GSM8K with vLLM's rollouts (arXiv 2505.09388).

    python -m launch.train --config=configs/qwen3_32b.py \
      --config.model.checkpoint=FOLDER --config.dataset.path=train.jsonl

It is like configs/qwen3_0_6b.py, but on a slice of TPUs: rows in sixteen shards, heads
in four.
"""

from configs import _qwen3
from jaxrl.config import Config

TOPOLOGY = 'v5p:4x4x4'  # of the learner, which `launch.plan` plans for


def get_config(algorithm: str = 'grpo') -> Config:
  """Returns the config for Qwen3-32B."""
  config = _qwen3.gsm8k('Qwen3-32B', algorithm)
  config.batch.num_micro_batches = 4
  config.mesh.update(data=1, fsdp=16, tensor=4)
  config.rollout.engine = 'vllm(tensor_parallel_size=4)'
  return config
