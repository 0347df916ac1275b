"""Qwen3-0.6B learns grade-school mathematics with vLLM's rollouts (arXiv 2505.09388).

    python -m launch.train --config=configs/qwen3_0_6b.py \
      --config.model.checkpoint=FOLDER --config.dataset.path=train.jsonl

FOLDER: of the checkpoint, as Hugging Face has it; by default Qwen3-0.6B, here. The test
set is the file beside the training set, test.jsonl. On one GPU learner and engine share
it; on several the engines have half of them, one each, and the learner the others.
"""

from configs import _qwen3
from jaxrl.config import Config

TOPOLOGY = 'h200:1'  # of the learner, which `launch.plan` plans for


def get_config(algorithm: str = 'grpo') -> Config:
  config = _qwen3.gsm8k('Qwen3-0.6B', algorithm)
  config.batch.micro_batches = 16
  config.cluster.weights = 'shared_memory(dtype="bfloat16")'  # on one machine
  return config
