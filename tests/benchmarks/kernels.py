"""Kernels on and off: a step of the toy, and log-probs of a large vocabulary's tokens.

The two take turns. What `auto` chooses here is logged; where it chooses the reference,
both are the same program.
"""

import asyncio
import logging
import statistics
import time
from typing import Any

import jax

from jaxrl.models.model_config import ModelConfig
from jaxrl.models.transformer_lm import TransformerLM
from kernels.dispatch import KERNEL_OPTIONS
from tests.benchmarks import toy

TOKENS, WIDTH, VOCAB = 1024, 256, 32_768


class _Chosen(logging.Handler):
  """Keeps what the device_thread says."""

  def __init__(self) -> None:
    super().__init__()
    self.lines: list[str] = []

  def emit(self, record: logging.LogRecord) -> None:
    self.lines.append(record.getMessage())


async def _steps(steps: int) -> dict[str, dict[str, float]]:
  runs = {asked: toy.Toy(decode_steps=8, kernels=asked) for asked in KERNEL_OPTIONS}
  times: dict[str, list[dict[str, float]]] = {asked: [] for asked in KERNEL_OPTIONS}
  for run in runs.values():
    await run.start()
  for step in range(steps + 1):
    for asked, run in runs.items():
      times[asked].append(await run.step(step))
  for run in runs.values():
    run.device_thread.close()
  return {
    asked: {
      f'{name}_s': statistics.median(t[name] for t in found[1:]) for name in found[0]
    }
    for asked, found in times.items()
  }


def _scores(repeats: int) -> dict[str, dict[str, float]]:
  """Milliseconds of log-probs with their gradient, and the memory beside arguments."""
  config = ModelConfig(VOCAB, WIDTH, 1, 4, 2, 64, WIDTH)
  params = TransformerLM(config).init(jax.random.key(0))
  tokens = jax.random.randint(jax.random.key(1), (1, TOKENS), 1, VOCAB)
  ids = tokens * 0 + 1
  programs, found = {}, {}
  for asked in KERNEL_OPTIONS:
    model = TransformerLM(config, kernels=asked)

    def loss(params, tokens, ids, model=model):
      return model.policy_outputs(params, tokens, ids).logprobs.sum()

    programs[asked] = (
      jax.jit(jax.value_and_grad(loss)).lower(params, tokens, ids).compile()
    )
    jax.block_until_ready(programs[asked](params, tokens, ids))
  times: dict[str, list[float]] = {asked: [] for asked in KERNEL_OPTIONS}
  for _ in range(repeats):
    for asked, program in programs.items():
      start = time.perf_counter()
      jax.block_until_ready(program(params, tokens, ids))
      times[asked].append(time.perf_counter() - start)
  for asked, program in programs.items():
    memory = program.memory_analysis()
    found[asked] = {
      'scores_ms': 1e3 * statistics.median(times[asked]),
      'scores_mib': memory.temp_size_in_bytes / 2**20,
    }
  return found


def measure(*, steps: int = 5, repeats: int = 5) -> dict[str, Any]:
  """'auto', 'reference' → the toy's seconds and the scores' cost; 'chosen' → lines."""
  log, chosen = logging.getLogger('kernels.dispatch'), _Chosen()
  log.setLevel(logging.INFO)
  log.addHandler(chosen)
  try:
    whole, scores = asyncio.run(_steps(steps)), _scores(repeats)
  finally:
    log.removeHandler(chosen)
  return {asked: whole[asked] | scores[asked] for asked in KERNEL_OPTIONS} | {
    'chosen': chosen.lines
  }
