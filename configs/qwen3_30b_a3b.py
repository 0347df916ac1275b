"""Qwen3-30B-A3B learns grade-school mathematics, with experts (arXiv 2505.09388).

    python -m launch.train --config=configs/qwen3_30b_a3b.py \
      --config.model.checkpoint=FOLDER --config.dataset.path=train.jsonl

As configs/qwen3_0_6b.py, on a slice of TPUs. Each of eight rows of devices computes
sixteen of a layer's 128 experts; a row's eight devices share their parameters out.
"""

from configs import _qwen3
from jaxrl.config import Config

TOPOLOGY = 'v5p:4x4x4'  # of the learner, which `launch.plan` plans for


def get_config(algorithm: str = 'grpo') -> Config:
  config = _qwen3.gsm8k('Qwen3-30B-A3B', algorithm)
  config.batch.micro_batches = 4
  config.mesh.update(data=1, fsdp=8, expert=8)
  config.rollout.engine = 'vllm(tensor_parallel_size=4)'
  return config
