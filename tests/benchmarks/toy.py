"""One GRPO step of a small model, through the real learner, engine and weight store.

The toy: Qwen3 shape, 3.28 M parameters, float32; 8 prompts of 32 tokens × 8 samples of
64 tokens, always full length unless PEER_ENDS=1; AdamW, no KL term. PEER_SIZE names
another of `shape.SIZES`. Rewards are made up: what is timed is generation and learning,
not an environment.
"""

import asyncio
import statistics
import time
from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np

from jaxrl.algorithms import registry
from jaxrl.device_thread import DeviceThread
from jaxrl.models.exact_mode import Exact
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.engine.jax_engine import JaxEngine
from jaxrl.rollout.weights.weight_store import InProcessWeightStore
from jaxrl.training.batching import packing_plan
from jaxrl.training.learner import Learner
from jaxrl.training.learner_options import LearnerOptions
from jaxrl.training.monitoring import CompileCounter
from jaxrl.training.optimizers import OptimizerOptions, make_optimizer
from jaxrl.types import Completion, Group, SamplingParams, Trajectory
from tests.benchmarks import machine
from tests.benchmarks.peers import shape
from tests.benchmarks.peers.shape import GENERATE_FLOPS, TRAIN_FLOPS

SIZE = shape.SIZE
CONFIG = ModelConfig(**SIZE.model)
ROWS = SIZE.prompts * SIZE.samples
WARM_STEPS = 3


class Toy:
  """The parts of a run, and one method a phase. remat, entropy: the learner's.
  exact, kernels: of both. share: each prompt is learned from once for its samples.
  size: of model and step. weights_dtype: the engine's.
  """

  def __init__(
    self,
    *,
    remat: str = 'none',
    entropy: bool = True,
    decode_steps: int,
    exact: bool = False,
    kernels: str = 'auto',
    share: bool = False,
    size: shape.Size = SIZE,
    weights_dtype: Literal['', 'bfloat16'] = '',
  ):
    self.most_mismatch = 0.03 if weights_dtype == 'bfloat16' else 1e-3
    self.size, rows = size, size.prompts * size.samples
    self.device_thread = DeviceThread()
    mode = Exact.for_slots(rows) if exact else None
    config = ModelConfig(**size.model)
    model = TransformerLM(config, remat=remat, exact=mode, kernels=kernels)
    self.engine = JaxEngine(
      model,
      device_thread=self.device_thread,
      max_num_seqs=rows,
      max_length=size.prompt + size.new,
      prompt_buckets=(size.prompt,),
      decode_steps=decode_steps,
      weights_dtype=weights_dtype,
    )
    self.weights = InProcessWeightStore(self.engine, device_thread=self.device_thread)
    # Micro-batches, as tuned: a shallow model has two abreast, and a deep one two that
    # take 450 MiB less than one, for 5% more time.
    parts = min(size.prompts, 4) if model.is_shallow and not shape.ENDS else 2
    self.learner = Learner(
      model,
      model.init(jax.random.key(0)),
      registry.make('grpo', {'kl_coef': 0.0}),
      num_rows=rows,
      length_buckets=(size.prompt + size.new,),
      optimizer=make_optimizer(OptimizerOptions(learning_rate=shape.LEARNING_RATE)),
      device_thread=self.device_thread,
      options=LearnerOptions(
        log_entropy=entropy, packing=_packing(size, parts) if share else ''
      ),
    )

  async def start(self) -> None:
    """Compiles everything."""
    await self.learner.warmup()
    await self.weights.publish(0, self.learner.params)
    await self.engine.warmup()

  async def generate(
    self, rows: Sequence[Sequence[int]], lengths: Sequence[int] = ()
  ) -> list[Completion]:
    """New tokens with log-probs for each row, all that `size` has unless told."""
    counts = lengths or [self.size.new] * len(rows)
    rules = [SamplingParams(max_tokens=n, seed=i) for i, n in enumerate(counts)]
    work = (
      self.engine.generate(f'{i}', row, rule)
      for i, (row, rule) in enumerate(zip(rows, rules, strict=True))
    )
    return await asyncio.gather(*work)

  async def step(self, step: int) -> dict[str, float]:
    """One whole step; seconds by phase."""
    start = time.perf_counter()
    await self.weights.publish(step + 1, self.learner.params)
    size = self.size
    rows = prompts(step, size.prompts, size.samples, size)
    completions = await self.generate(rows, shape.lengths(step, size))
    generated = time.perf_counter()
    metrics = await self.learner.update(_groups(rows, completions, step, size))
    end = time.perf_counter()
    assert metrics['mismatch/logprob_difference'] < self.most_mismatch, metrics
    return {
      'step': end - start,
      'generate': generated - start,
      'train': end - generated,
    }


def _packing(size: shape.Size, parts: int) -> str:
  """Packs a step's rows into so many micro-batches, or one more if samples are long."""
  rows, longest = size.prompts * size.samples, size.prompt + size.new
  # Each sample goes on from the prompt's last token.
  new = size.new if not shape.ENDS else shape.mean_length(size)
  tokens = size.prompts * (size.prompt - 1) + rows * (new + 1)
  tokens *= 1.2 if shape.ENDS else 1
  # With fewer, attention does not run on the rectangle of single sequences.
  tokens = max(int(tokens / parts), rows // parts * longest // 2)
  # A packed row holds a prompt and its samples, or whatever fits.
  group = size.prompt - 1 + size.samples * (size.new + 1)
  length = tokens if shape.ENDS else group
  return packing_plan.first_fit(tokens=tokens, length=length, sequences=rows // parts)


def prompts(
  seed: int, distinct: int, samples: int, size: shape.Size = SIZE
) -> list[list[int]]:
  draw = np.random.default_rng(seed)
  rows = draw.integers(1, size.model['vocab_size'], (distinct, size.prompt)).tolist()
  return [row for row in rows for _ in range(samples)]


def _groups(
  rows: list[list[int]], completions: list[Completion], step: int, size: shape.Size
) -> list[Group]:
  rewards = np.random.default_rng((step, 1)).random(len(rows), np.float32)
  groups: list[Group] = [[] for _ in range(size.prompts)]
  none = np.zeros(size.prompt, np.float32)
  for i, (row, done) in enumerate(zip(rows, completions, strict=True)):
    length = size.prompt + len(done.tokens)
    reward = np.zeros(length, np.float32)
    reward[-1] = rewards[i]
    groups[i // size.samples].append(
      Trajectory(
        np.concatenate([row, done.tokens]).astype(np.int32),
        np.arange(length) >= size.prompt,
        np.concatenate([none, done.logprobs]),
        reward,
        np.concatenate([none - 1, done.weights_versions]).astype(np.int32),
        env_group=i // size.samples,
        sample_index=i % size.samples,
      )
    )
  return groups


async def _measure(steps: int, decodes: int, options: dict) -> dict[str, float]:
  begun = time.perf_counter()
  toy = Toy(**options)
  times, peaks, rates = [], [], []
  with CompileCounter() as counter:
    await toy.start()
    for step in range(steps + WARM_STEPS):
      if step == WARM_STEPS:
        before = counter.count
      peaks.append(machine.matmul_peak())
      times.append(await toy.step(step))
      if step == 0:
        ready = time.perf_counter() - begun
    late = counter.count - before
    for round_ in range(decodes):  # every prompt another: all 64 are prefilled
      await toy.weights.publish(1000 + round_, toy.learner.params)
      start = time.perf_counter()
      await toy.generate(prompts(round_, ROWS, 1))
      rates.append(ROWS * SIZE.new / (time.perf_counter() - start))
  toy.device_thread.close()
  times, peaks = times[WARM_STEPS:], peaks[WARM_STEPS:]
  medians = {name: statistics.median(t[name] for t in times) for name in times[0]}
  peak = statistics.median(peaks)
  whole = GENERATE_FLOPS + TRAIN_FLOPS
  return {
    **{f'{name}_s': seconds for name, seconds in medians.items()},
    'fastest_step_s': min(t['step'] for t in times),
    'floor_s': whole / peak,
    'peak_gflops': peak / 1e9,
    'share': whole / peak / medians['step'],
    'train_share': TRAIN_FLOPS / peak / medians['train'],
    'generate_share': GENERATE_FLOPS / peak / medians['generate'],
    'tokens_per_s': ROWS * SIZE.new / medians['generate'],
    'decode_tokens_per_s': statistics.median(rates) if rates else 0.0,
    'programs': counter.count,
    'programs_after_warmup': late,
    'first_step_s': ready,
    'peak_mib': machine.peak_mebibytes(),
  }


def measure(
  *,
  steps: int = 8,
  decodes: int = 4,
  remat: str = 'none',
  entropy: bool = True,
  decode_steps: int = 8,
) -> dict[str, float]:
  """Medians over `steps` steps, each beside the matrix product's rate at that time."""
  options = {'remat': remat, 'entropy': entropy, 'decode_steps': decode_steps}
  return asyncio.run(_measure(steps, decodes, options))
