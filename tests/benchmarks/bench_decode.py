"""Decode throughput of JaxEngine on a toy, beside what the machine could do.

Run as `python -m tests.benchmarks.bench_decode`. The toy: Qwen3 shape, 3.28 M
parameters, 64 requests of 32 + 64 tokens with log-probs, float32.
"""

import argparse
import asyncio
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.dispatch import Dispatcher
from jaxrl.models.config import ModelConfig
from jaxrl.models.model import Model
from jaxrl.rollout.jax_engine import JaxEngine
from jaxrl.types import SamplingParams

TOY = ModelConfig(
  vocab_size=512,
  hidden_size=256,
  num_layers=4,
  num_heads=4,
  num_kv_heads=2,
  head_dim=64,
  intermediate_size=768,
)


def matmul_peak(size: int = 1024, repeats: int = 10) -> float:
  """The best float32 matrix product's FLOP/s."""
  a = jnp.ones((size, size), jnp.float32)
  multiply = jax.jit(jnp.matmul)
  multiply(a, a).block_until_ready()
  times = []
  for _ in range(repeats):
    start = time.perf_counter()
    multiply(a, a).block_until_ready()
    times.append(time.perf_counter() - start)
  return 2 * size**3 / min(times)


def step_flops(config: ModelConfig, slots: int, context: float) -> float:
  """Floating-point operations of one decode step at a mean context length."""
  heads = config.num_heads * config.head_dim
  kv = config.num_kv_heads * config.head_dim
  layer = config.hidden_size * (2 * heads + 2 * kv + 3 * config.intermediate_size)
  weights = config.num_layers * layer + config.vocab_size * config.hidden_size
  return 2 * slots * (weights + config.num_layers * 2 * heads * context)


def prompts(distinct: int, samples: int, length: int) -> list[list[int]]:
  draw = np.random.default_rng(0)
  rows = draw.integers(1, TOY.vocab_size, (distinct, length)).tolist()
  return [row for row in rows for _ in range(samples)]


async def measure(engine: JaxEngine, rows: list[list[int]], new: int) -> dict:
  engine.metrics()
  start = time.perf_counter()
  rules = [SamplingParams(max_tokens=new, seed=i) for i in range(len(rows))]
  work = [
    engine.generate(f'{i}', row, rule)
    for i, (row, rule) in enumerate(zip(rows, rules, strict=True))
  ]
  await asyncio.gather(*work)
  wall = time.perf_counter() - start
  return {'wall': wall, 'rate': len(rows) * new / wall, **engine.metrics()}


async def run(options: argparse.Namespace) -> None:
  model = Model(TOY)
  dispatcher = Dispatcher()
  engine = JaxEngine(
    model,
    dispatcher=dispatcher,
    num_slots=64,
    max_length=96,
    decode_steps=options.decode_steps,
  )
  params = model.init(jax.random.key(0))
  await engine.load(0, params)
  start = time.perf_counter()
  await engine.warmup()
  print(f'warm-up {time.perf_counter() - start:.1f} s, {engine.compile_count} programs')
  print(
    'prompts        tokens/s  best  decode ms/step  prefill ms  peak GFLOP/s  floor'
  )
  flops = step_flops(TOY, 64, 64)
  for name, distinct in (('8 x 8', 8), ('64 x 1', 64)):
    rows = prompts(distinct, 64 // distinct, 32)
    runs, peaks = [], []
    for round_ in range(options.repeats):
      peaks.append(matmul_peak())
      # New weights: no prompt is remembered from the round before.
      await engine.load(round_ + 1, params)
      runs.append(await measure(engine, rows, 64))
    peak = max(peaks)
    middle = sorted(runs, key=lambda r: r['rate'])[len(runs) // 2]
    best = max(r['rate'] for r in runs)
    step = 1e3 * middle['time/decode'] / middle['rollout/decode_steps']
    print(
      f'{name:<12} {middle["rate"]:10.0f} {best:6.0f} {step:12.2f} '
      f'{1e3 * middle["time/prefill"]:12.1f} {peak / 1e9:10.0f} '
      f'{1e3 * flops / peak:10.2f} ms'
    )
  dispatcher.close()


if __name__ == '__main__':
  parser = argparse.ArgumentParser()
  parser.add_argument('--decode_steps', type=int, default=8)
  parser.add_argument('--repeats', type=int, default=7)
  asyncio.run(run(parser.parse_args()))
