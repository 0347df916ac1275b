"""Kernels on and off: a step of the toy, and log-probs of a large vocabulary's tokens.

And what decoding consists of on a CPU: 8 rows times matrices of SmolLM2's shape, as XLA
multiplies them and in panels.

All take turns. What `auto` chooses here is logged; where it chooses the reference,
both are the same program.
"""

import asyncio
import functools
import logging
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models.model_config import ModelConfig
from jaxrl.models.transformer_lm import TransformerLM
from kernels.dispatch import KERNEL_OPTIONS
from kernels.native import library, row_product
from tests.benchmarks import toy

TOKENS, WIDTH, VOCAB = 1024, 256, 32_768
# Inputs, columns, and as many matrices as no cache holds.
MATRICES = ((576, 3072, 30), (1536, 576, 60), (576, 49_152, 2))
FEW_ROWS = 8


class _Chosen(logging.Handler):
  """Keeps what the device_thread says."""

  def __init__(self) -> None:
    super().__init__()
    self.lines: list[str] = []

  def emit(self, record: logging.LogRecord) -> None:
    self.lines.append(record.getMessage())


async def _steps(steps: int) -> dict[str, dict[str, float]]:
  runs = {option: toy.Toy(decode_steps=8, kernels=option) for option in KERNEL_OPTIONS}
  times: dict[str, list[dict[str, float]]] = {option: [] for option in KERNEL_OPTIONS}
  for run in runs.values():
    await run.start()
  for step in range(steps + 1):
    for option, run in runs.items():
      times[option].append(await run.step(step))
  for run in runs.values():
    run.device_thread.close()
  return {
    option: {
      f'{name}_s': statistics.median(t[name] for t in phases[1:]) for name in phases[0]
    }
    for option, phases in times.items()
  }


def _scores(repeats: int) -> dict[str, dict[str, float]]:
  """Milliseconds of log-probs with their gradient, and the memory beside arguments."""
  config = ModelConfig(VOCAB, WIDTH, 1, 4, 2, 64, WIDTH)
  params = TransformerLM(config).init(jax.random.key(0))
  tokens = jax.random.randint(jax.random.key(1), (1, TOKENS), 1, VOCAB)
  ids = tokens * 0 + 1
  programs, costs = {}, {}
  for option in KERNEL_OPTIONS:
    model = TransformerLM(config, kernels=option)

    def loss(params, tokens, ids, model=model):
      return model.policy_outputs(params, tokens, ids).logprobs.sum()

    programs[option] = (
      jax.jit(jax.value_and_grad(loss)).lower(params, tokens, ids).compile()
    )
    jax.block_until_ready(programs[option](params, tokens, ids))
  times: dict[str, list[float]] = {option: [] for option in KERNEL_OPTIONS}
  for _ in range(repeats):
    for option, program in programs.items():
      start = time.perf_counter()
      jax.block_until_ready(program(params, tokens, ids))
      times[option].append(time.perf_counter() - start)
  for option, program in programs.items():
    memory = program.memory_analysis()
    costs[option] = {
      'scores_ms': 1e3 * statistics.median(times[option]),
      'scores_mib': memory.temp_size_in_bytes / 2**20,
    }
  return costs


def _turns(programs: dict[str, Any], inputs: dict[str, Any], rounds: int = 25):
  """Median seconds of programs that take turns."""
  times: dict[str, list[float]] = {name: [] for name in programs}
  for _ in range(rounds + 2):
    for name, program in programs.items():
      start = time.perf_counter()
      jax.block_until_ready(program(*inputs[name]))
      times[name].append(time.perf_counter() - start)
  return {name: statistics.median(seconds[2:]) for name, seconds in times.items()}


def _products() -> dict[str, dict[str, float]]:
  """GB/s of matrices that are read once for 8 rows, by shape and form."""
  figures = {}
  for inputs, columns, count in MATRICES:
    for dtype in row_product.DTYPES:
      plain = [
        jax.random.normal(jax.random.key(i), (inputs, columns)).astype(dtype)
        for i in range(count)
      ]
      # XLA's fastest form of each: bfloat16 has to be output-major.
      turned = dtype == 'bfloat16'
      kept = [jax.block_until_ready(w.T) for w in plain] if turned else plain

      def multiply(x, w, turned=turned):
        sides = ((1,), (1 if turned else 0,)), ((), ())
        x = x.astype(w.dtype)
        return jax.lax.dot_general(x, w, sides, preferred_element_type=jnp.float32)

      forms = {'XLA': (multiply, kept)}
      if not library.obstacle():
        forms['panels'] = row_product.multiply, [row_product.pack(w) for w in plain]

      def chain(product, x, matrices):
        for matrix in matrices:  # each product waits for the one before
          x = x + 1e-9 * product(x, matrix)[:, :1]
        return x

      x = jax.random.normal(jax.random.key(0), (FEW_ROWS, inputs))
      runs = {n: jax.jit(functools.partial(chain, f)) for n, (f, _) in forms.items()}
      seconds = _turns(
        runs, {name: (x, matrices) for name, (_, matrices) in forms.items()}
      )
      size = sum(w.nbytes for w in plain) / 1e9
      name = f'{inputs} × {columns}, {dtype}'
      figures[name] = {form: size / s for form, s in seconds.items()}
  return figures


def measure(*, steps: int = 5, repeats: int = 5) -> dict[str, Any]:
  """'auto', 'reference' → the toy's seconds and the scores' cost; 'chosen' → lines."""
  log, chosen = logging.getLogger('kernels.dispatch'), _Chosen()
  log.setLevel(logging.INFO)
  log.addHandler(chosen)
  try:
    whole, scores = asyncio.run(_steps(steps)), _scores(repeats)
  finally:
    log.removeHandler(chosen)
  return {option: whole[option] | scores[option] for option in KERNEL_OPTIONS} | {
    'chosen': chosen.lines,
    'products_gb_per_s': _products(),
  }
