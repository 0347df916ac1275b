"""Qwen3-0.6B learns grade-school mathematics with vLLM's rollouts (arXiv 2505.09388).

    python -m launch.train --config=configs/qwen3_0_6b_gsm8k.py \
      --config.model.checkpoint=FOLDER --config.dataset.path=train.jsonl

FOLDER: of the checkpoint, as Hugging Face has it; by default Qwen3-0.6B, here. The test
set is the file beside the training set, test.jsonl. On one GPU learner and engine share
it; on several the engines have half of them, one each, and the learner the others.
"""

from configs import base
from jaxrl.config import Config

PROMPT = '{observation}\nThink step by step and end with the answer alone after ####.'


def get_config(algorithm: str = 'grpo') -> Config:
  config = base.get_config(algorithm)
  config.num_steps = 200
  config.model.update(checkpoint='Qwen3-0.6B', dtype='bfloat16', remat='full')
  config.batch.update(num_groups=32, max_length=1024, buckets=(512, 1024))
  config.batch.micro_batches = 16
  config.optimizer.update(learning_rate=1e-6, warmup_steps=10)
  config.rollout.update(engine='vllm', num_slots=256, async_ratio=1.0)
  config.env.gsm8k = base.env_section(
    'math', turn_template=PROMPT, max_tokens_per_step=768
  )
  config.eval.update(every=20, num_tasks=256)
  config.checkpoint.update(every=20, export=True)
  config.cluster.update(ray=True, num_engines=0, num_workers=8)
  # As vLLM holds them: of bf16 weights about one in a hundred changes in a step.
  config.cluster.weights = 'object_store(dtype="bfloat16")'
  return config
