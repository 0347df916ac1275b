"""The functional core alone: loss, weights and gradient of `[512, 4096]` log-probs."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.algorithms import compose
from jaxrl.functional.aggregation import row_weights, token_weights
from jaxrl.types import Algorithm
from tests.benchmarks import machine

ROWS, LENGTH, GROUP = 512, 4096, 8
# label → algorithm, its options, ms of the same in PyTorch (tuned, one run on a
# similar machine; eager, without the advantage).
CASES = {
  'ppo': ('grpo', {'kl_coef': 0.0}, 39),
  'ppo + k2': ('grpo', {'kl_loss': 'k2(coef=0.001)'}, 47),
  'gspo': ('gspo', {'kl_coef': 0.0}, 29),
  'cispo': ('cispo', {}, 13),
  'sapo': ('sapo', {}, 22),
  'topr': ('topr', {'kl_coef': 0.0}, 13),
  'opmd': ('opmd', {'kl_coef': 0.0}, 5.5),
  'sppo': ('sppo', {}, 13),
  'rec': ('rec', {}, 11),
  'importance_sampling': ('grpo', {'policy_loss': 'importance_sampling()'}, 14),
  'sft': ('sft', {}, 4.3),
}


def columns(rows: int = ROWS, length: int = LENGTH) -> dict[str, Any]:
  """A batch whose prompts and answers differ in length, a policy a little off."""
  draw = np.random.default_rng(0)
  time_ = np.arange(length)
  first = draw.integers(length // 16, length // 4, (rows, 1))
  last = draw.integers(length // 2, length, (rows, 1))
  mask = (time_ >= first) & (time_ <= last)
  old = np.where(mask, -draw.exponential(1.0, (rows, length)), 0)
  new = np.where(mask, old + 0.05 * draw.standard_normal((rows, length)), 0)
  rewards = np.where(time_ == last, draw.random((rows, 1)), 0)
  reals = {
    'logprobs': new,
    'old_logprobs': old,
    'rollout_logprobs': old,
    'ref_logprobs': old,
    'rewards': rewards,
    'advantages': np.where(mask, draw.standard_normal((rows, 1)), 0),
  }
  runs = np.arange(rows, dtype=np.int32)
  ids = {'task_ids': runs // GROUP, 'run_ids': runs, 'step_ids': 0 * runs}
  found = {name: x.astype(np.float32) for name, x in reals.items()}
  found |= {**ids, 'mask': mask, 'expert_mask': np.zeros(rows, bool)}
  return jax.tree.map(jnp.asarray, found)


def program(algorithm: Algorithm, with_advantage: bool) -> Callable[..., Any]:
  """(logprobs, other columns) → the loss, its metrics, the gradient."""

  def value(logprobs, batch):
    batch = batch | {'logprobs': logprobs}
    if with_advantage and algorithm.advantage is not None:
      found = compose.call_part(algorithm.advantage, batch)
      batch |= {'advantages': found.advantages}
    mask, total, metrics = batch['mask'], 0.0, {}
    token = token_weights(mask, mode=algorithm.aggregation)
    mean = token_weights(mask)
    for part in (algorithm.policy_loss, algorithm.kl_loss):
      if part is None:
        continue
      result = compose.call_part(part, batch)
      loss, told = result if isinstance(result, tuple) else (result, {})
      weights = token if loss.ndim == 2 else row_weights(mask)
      total += jnp.sum(weights * loss)
      metrics |= {k: jnp.sum(mean * v) if v.ndim else v for k, v in told.items()}
    return total, metrics

  return jax.value_and_grad(value, has_aux=True)


def _milliseconds(run: Callable[[], Any], repeats: int) -> float:
  jax.block_until_ready(run())
  times = []
  for _ in range(repeats):
    start = time.perf_counter()
    jax.block_until_ready(run())
    times.append(time.perf_counter() - start)
  return 1e3 * statistics.median(times)


def measure(*, repeats: int = 9) -> dict[str, dict[str, float]]:
  """label → ms of the loss alone and with its advantage, and what bytes allow.

  floor_ms: to read the float columns and the mask that the loss names once, and to
  write the gradient, at the rate measured beside it.
  """
  batch = columns()
  logprobs, table = batch.pop('logprobs'), {}
  for label, (name, options, torch_ms) in CASES.items():
    algorithm = compose.make(name, options)
    rate = machine.memory_rate()
    parts = [p for p in (algorithm.policy_loss, algorithm.kl_loss) if p]
    named = {c for part in parts for c in compose.columns(part)} | {'mask'}
    read = {c: x for c, x in batch.items() if c in named} | {'logprobs': logprobs}
    least = sum(x.nbytes for x in read.values()) + logprobs.nbytes
    row = {'torch_ms': torch_ms, 'floor_ms': 1e3 * least / rate}
    for key, whole in (('ms', False), ('with_advantage_ms', True)):
      if whole and algorithm.advantage is None:
        row[key] = row['ms']
        continue
      function = jax.jit(program(algorithm, whole)).lower(logprobs, batch).compile()
      row[key] = _milliseconds(lambda f=function: f(logprobs, batch), repeats)
      if not whole:
        cost = function.cost_analysis() or {}
        row['mib'] = cost.get('bytes accessed', 0.0) / 2**20
        row['least_mib'] = least / 2**20
    table[label] = row
  return table
