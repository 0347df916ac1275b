"""A step of the Tinker server: the same rows, of one tenant or of several."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxrl.model_loading import random_config
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.tinker import row_adapters
from jaxrl.rollout.tinker.tenant_learner import (
  TenantLearner,
  TenantSnapshot,
  TrainingRow,
)

ROWS, LENGTH, RANK = 16, 64, 8
ADAM = {
  'learning_rate': 1e-3,
  'beta1': 0.9,
  'beta2': 0.95,
  'eps': 1e-8,
  'weight_decay': 0.0,
  'grad_clip_norm': 0.0,
}


def _stepper(model: TransformerLM, params: Any, number: int) -> Callable[[], None]:
  """Returns what takes a step of each of `number` tenants, which share the rows."""
  learner = TenantLearner(
    model,
    params,
    max_tenants=number,
    max_rank=RANK,
    max_length=LENGTH,
    step_tokens=ROWS * LENGTH,
  )
  layers = frozenset(row_adapters.layer_sizes(model.config))
  tenants = [
    learner.add(
      TenantSnapshot(row_adapters.init_adapters(model.config, RANK, seed, layers))
    )
    for seed in range(number)
  ]
  draw, rows = np.random.default_rng(0), []
  for i in range(ROWS):
    tokens, targets = draw.integers(0, 512, (2, LENGTH)).astype(np.int32)
    rows.append((tenants[i % number], TrainingRow(tokens, targets[:, None])))

  def step() -> None:
    learner.run(rows, backward=True)
    for tenant in tenants:
      learner.adam_step(tenant, ADAM)

  return step


def measure(steps: int = 10) -> dict[str, float]:
  """Median seconds of a step by the number of tenants, in turn."""
  config = random_config(
    hidden_size=256,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=768,
  )
  model = TransformerLM(config)
  params = jax.device_put(model.init(jax.random.key(0)), jax.devices()[0])
  steppers = {number: _stepper(model, params, number) for number in (1, 4, 16)}
  times: dict[int, list[float]] = {number: [] for number in steppers}
  for _ in range(steps + 2):
    for number, step in steppers.items():
      start = time.perf_counter()
      step()
      times[number].append(time.perf_counter() - start)
  # The first ones compile.
  seconds = {f'{n}_s': statistics.median(own[2:]) for n, own in times.items()}
  ratios = {f'{n}_ratio': seconds[f'{n}_s'] / seconds['1_s'] for n in (4, 16)}
  return {**seconds, **ratios, 'rows': ROWS, 'length': LENGTH, 'rank': RANK}
