"""The train step of Qwen3 shapes through the learner: tokens a second, and MFU."""

import asyncio
import statistics
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxrl.algorithms import registry
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.training.learner import Learner
from jaxrl.training.learner_options import LearnerOptions
from jaxrl.training.optimizers import OptimizerOptions, make_optimizer
from jaxrl.types import Group, Trajectory
from tests.benchmarks.gpu import device, shapes

ROWS, LENGTH, GROUP = 32, 2048, 8  # 65,536 tokens a step
# What the backward pass keeps, rows of a micro-batch, kernels.
CASES = (
  ('dots', 4, 'auto'),
  ('dots', 8, 'auto'),
  ('none', 2, 'auto'),
  ('none', 4, 'auto'),
  ('full', 8, 'auto'),
  ('dots', 4, 'reference'),
)
TINY = (8, 64, 2, 4)
STEPS = 4


def groups(vocab: int, rows: int, length: int, size: int, seed: int) -> list[Group]:
  """Rows of random tokens, all full: nothing is lost to padding."""
  draw = np.random.default_rng(seed)
  half = np.arange(length) >= length // 4
  groups_of_rows: list[Group] = [[] for _ in range(rows // size)]
  for i in range(rows):
    reward = np.zeros(length, np.float32)
    reward[-1] = draw.random()
    logprobs = np.where(half, -np.log(vocab), 0).astype(np.float32)
    versions = np.where(half, 0, -1).astype(np.int32)
    tokens = draw.integers(1, vocab, length).astype(np.int32)
    columns = tokens, half, logprobs, reward, versions
    groups_of_rows[i // size].append(
      Trajectory(*columns, env_group=i // size, sample_index=i % size)
    )
  return groups_of_rows


def one(config: ModelConfig, sizes: tuple[int, ...], flops: float, **options: Any):
  """Tokens a second, and the share of the matrix products' rate, of one model."""
  rows, length, micro, size = sizes
  model = TransformerLM(config, dtype='bfloat16', **options)
  learner = Learner(
    model,
    model.init(jax.random.key(0)),
    registry.make('grpo', {'kl_coef': 0.0}),
    num_rows=rows,
    length_buckets=(length,),
    optimizer=make_optimizer(OptimizerOptions(learning_rate=1e-6)),
    options=LearnerOptions(
      num_micro_batches=micro, log_entropy=False, logprob_mismatch_warn=float('inf')
    ),
  )
  asyncio.run(learner.warmup())
  times = []
  for step in range(STEPS + 1):
    work = groups(config.vocab_size, rows, length, size, step)
    times.append(asyncio.run(learner.update(work))['time/learn'])
  spent = statistics.median(times[1:])
  stats = jax.devices()[0].memory_stats() or {}
  return {
    'step_s': spent,
    'tokens_per_s': rows * length / spent,
    'mfu': shapes.train_flops(config, rows, length) / spent / flops,
    'peak_gib': stats.get('peak_bytes_in_use', 0) / 2**30,
  }


def measure(tiny: bool = False) -> Iterator[dict[str, Any]]:
  """(model, remat, kernels) → figures, so far; a case that fails says why."""
  rates, figures = device.rates(tiny), {}
  models = shapes.TINY if tiny else shapes.MODELS
  for remat, micro, kernels in CASES[: 1 if tiny else None]:
    for label, config in models.items():
      if kernels == 'reference' and label != next(iter(models)):
        continue
      name = f'{label}, remat {remat}, {micro} rows at once, kernels {kernels}'
      try:
        sizes = TINY if tiny else (ROWS, LENGTH, ROWS // micro, GROUP)
        figures[name] = one(config, sizes, rates['flops'], remat=remat, kernels=kernels)
      except Exception as error:  # memory, mostly; the next case may fit
        figures[name] = {'failed': f'{type(error).__name__}: {str(error)[:160]}'}
      yield {'cases': figures, **rates}
