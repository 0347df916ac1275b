"""Provides what the configs of the Qwen3 models share: grade-school mathematics."""

from configs import base
from jaxrl.config import Config

PROMPT = '{observation}\nThink step by step and end with the answer alone after ####.'


def gsm8k(checkpoint: str, algorithm: str) -> Config:
  """Returns a config that trains on GSM8K with vLLM's rollouts.

  A step has 32 tasks, a row up to 1024 tokens, and products are in bf16.

  Args:
    checkpoint: Folder of the checkpoint, or the name of a published model.
    algorithm: Name of the algorithm.
  """
  config = base.get_config(algorithm)
  config.num_steps = 200
  config.model.update(checkpoint=checkpoint, dtype='bfloat16', remat='full')
  config.batch.update(num_groups=32, max_length=1024, length_buckets=(512, 1024))
  config.optimizer.update(learning_rate=1e-6, warmup_steps=10)
  config.rollout.update(engine='vllm', max_num_seqs=256, async_ratio=1.0)
  config.env.gsm8k = base.env_section(
    'math', turn_template=PROMPT, max_tokens_per_step=768
  )
  config.eval.update(interval=20, num_tasks=256)
  config.checkpoint.update(save_interval=20, export=True)
  config.cluster.update(ray=True, num_engines=0, num_workers=8)
  # As vLLM holds them: of bf16 weights about one in a hundred changes in a step.
  config.weight_sync.transport = 'auto(dtype="bfloat16")'
  return config
