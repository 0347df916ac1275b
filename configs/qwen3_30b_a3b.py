r"""Trains Qwen3-30B-A3B, a mixture of experts, on GSM8K (arXiv 2505.09388).

    python -m launch.train --config=configs/qwen3_30b_a3b.py \
      --config.model.checkpoint=FOLDER --config.dataset.path=train.jsonl

It is like configs/qwen3_0_6b.py, but on a slice of TPUs. Each of eight rows of devices
computes sixteen of a layer's 128 experts; the eight devices of a row shard their
parameters.
"""

from configs import _qwen3
from jaxrl.config import Config

TOPOLOGY = 'v5p:4x4x4'  # of the learner, which `launch.plan` plans for


def get_config(algorithm: str = 'grpo') -> Config:
  """Returns the config for Qwen3-30B-A3B."""
  config = _qwen3.gsm8k('Qwen3-30B-A3B', algorithm)
  config.batch.num_micro_batches = 4
  config.mesh.update(data=1, fsdp=8, expert=8)
  config.rollout.engine = 'vllm(tensor_parallel_size=4)'
  return config
