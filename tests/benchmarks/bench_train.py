"""The train step on a small model, beside the machine's own matmul rate.

`python -m tests.benchmarks.bench_train` prints a table: milliseconds a step, share of
the float32 matmul peak measured between the steps of the same run, compilations and
peak memory. 64 rows of 96 tokens, 3.28 M parameters, AdamW.
"""

import argparse
import asyncio
import resource
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.algorithms import compose
from jaxrl.models.config import ModelConfig
from jaxrl.models.model import Model
from jaxrl.training.learner import Learner
from jaxrl.training.optimizer import adamw
from jaxrl.training.programs import CompileCounter
from jaxrl.types import Trajectory

CONFIG = ModelConfig(
  vocab_size=512,
  hidden_size=256,
  num_layers=4,
  num_heads=4,
  num_kv_heads=2,
  head_dim=64,
  intermediate_size=768,
)
ROWS, PROMPT, LENGTH, GROUP = 64, 32, 96, 8
STEP_FLOPS = 122.8e9  # forward and backward, counted once, nothing recomputed


def made_up_groups() -> list[list[Trajectory]]:
  """Eight prompts of 32 tokens, eight completions of 64 each, random rewards."""
  rng = np.random.default_rng(0)
  mask = np.arange(LENGTH) >= PROMPT

  def row(g: int, m: int) -> Trajectory:
    rewards = np.zeros(LENGTH, np.float32)
    rewards[-1] = rng.random()
    logprobs = np.where(mask, -6.2, 0).astype(np.float32)
    tokens = rng.integers(0, CONFIG.vocab_size, LENGTH).astype(np.int32)
    version = np.where(mask, 0, -1).astype(np.int32)
    return Trajectory(tokens, mask, logprobs, rewards, version, group_id=g, member=m)

  return [[row(g, m) for m in range(GROUP)] for g in range(ROWS // GROUP)]


def matmul_peak(size: int = 2048) -> float:
  """FLOP/s of one float32 matrix product."""
  x = jnp.ones((size, size))
  product = jax.jit(jnp.matmul)
  product(x, x).block_until_ready()
  start = time.perf_counter()
  for _ in range(3):
    product(x, x).block_until_ready()
  return 3 * 2 * size**3 / (time.perf_counter() - start)


async def measure(steps: int, remat: str, **options) -> dict[str, float]:
  """Medians over `steps` updates, the matmul peak measured in between."""
  model = Model(CONFIG, remat=remat)
  params = jax.jit(model.init)(jax.random.key(0))
  algorithm = compose.make('grpo', {'kl_coef': 0.0})
  optimizer = adamw(learning_rate=1e-3)
  learner = Learner(
    model,
    params,
    algorithm,
    num_rows=ROWS,
    buckets=(LENGTH,),
    mismatch_alarm=10.0,  # the log-probs are made up
    optimizer=optimizer,
    **options,
  )
  groups = made_up_groups()
  times, peaks = [], []
  with CompileCounter() as counter:
    await learner.warmup()
    for step in range(steps + 2):
      peak = matmul_peak()
      metrics = await learner.update(groups)
      if step >= 2:
        times.append(metrics['time/learn'])
        peaks.append(peak)
  seconds, peak = statistics.median(times), statistics.median(peaks)
  return {
    'milliseconds': 1e3 * seconds,
    'peak_gflops': peak / 1e9,
    'share': STEP_FLOPS / seconds / peak,
    'compilations': counter.count,
    'peak_mib': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--steps', type=int, default=7)
  steps = parser.parse_args().steps
  print(f'{"train step":28}{"ms":>8}{"GFLOP/s peak":>14}{"share":>8}', end='')
  print(f'{"compiled":>10}{"peak MiB":>10}')
  for name, remat, options in (
    ('plain', 'none', {}),
    ('without entropy', 'none', {'entropy': False}),
    ('4 micro-batches', 'none', {'micro_batches': 4}),
    ('recomputed layers', 'full', {}),
  ):
    row = asyncio.run(measure(steps, remat, **options))
    print(f'{name:28}{row["milliseconds"]:8.0f}{row["peak_gflops"]:14.0f}', end='')
    print(f'{row["share"]:8.0%}{row["compilations"]:10}{row["peak_mib"]:10.0f}')


if __name__ == '__main__':
  main()
