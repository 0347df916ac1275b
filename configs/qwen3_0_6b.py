r"""Trains Qwen3-0.6B on GSM8K with vLLM's rollouts (arXiv 2505.09388).

    python -m launch.train --config=configs/qwen3_0_6b.py \
      --config.model.checkpoint=FOLDER --config.dataset.path=train.jsonl

FOLDER is the checkpoint in Hugging Face's format; by default Qwen3-0.6B in the current
folder. The test set is test.jsonl beside the training set. On one GPU learner and
engine share it; on several, half of them run one engine each, and the learner has the
others.
"""

from configs import _qwen3
from jaxrl.config import Config

TOPOLOGY = 'h200:1'  # of the learner, which `launch.plan` plans for


def get_config(algorithm: str = 'grpo') -> Config:
  """Returns the config for Qwen3-0.6B."""
  config = _qwen3.gsm8k('Qwen3-0.6B', algorithm)
  config.batch.num_micro_batches = 16
  config.weight_sync.transport = 'shared_memory(dtype="bfloat16")'  # on one machine
  return config
