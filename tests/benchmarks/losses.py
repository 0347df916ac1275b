"""The functional core: advantages, weights, loss and gradient of `[512, 4096]`."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.algorithms import requirements
from jaxrl.functional import components
from jaxrl.functional.aggregation import row_weights, token_weights
from jaxrl.types import Algorithm
from tests.benchmarks import machine
from tests.calls import make_algorithm

ROWS, LENGTH, GROUP = 512, 4096, 8
# label → algorithm, its options, and ms of Trinity-RFT's loss with gradient in PyTorch
# (tuned, another machine's run; eager, without weights or advantage), if known.
CASES: dict[str, tuple[str, dict[str, Any], float | None]] = {
  'ppo': ('grpo', {'kl_coef': 0.0}, 39),
  'ppo + k2': ('grpo', {'kl_loss': 'k2(coef=0.001)'}, 47),
  'gspo': ('gspo', {'kl_coef': 0.0}, 29),
  'cispo': ('cispo', {'kl_coef': 0.0}, 13),
  'sapo': ('sapo', {'kl_coef': 0.0}, 22),
  'topr': ('topr', {'kl_coef': 0.0}, 13),
  'opmd': ('opmd', {'kl_coef': 0.0}, 5.5),
  'sppo': ('sppo', {}, 13),
  'rec': ('rec', {'kl_coef': 0.0}, 11),
  'importance_sampling': (
    'grpo',
    {'kl_coef': 0.0, 'policy_loss': 'importance_sampling()'},
    14,
  ),
  'sft': ('sft', {}, 4.3),
  'vanilla': ('reinforce', {}, None),
  'tis': ('grpo', {'kl_coef': 0.0, 'policy_loss': 'tis()'}, None),
  'kimi': ('kimi', {}, None),
  'm2po, whole prepass': ('m2po', {}, None),
  'mix': ('mix', {}, None),
  'mix_chord': ('mix_chord', {}, None),
  'dpo': ('dpo', {}, None),
  'gae + ppo': ('ppo', {'kl_coef': 0.0}, None),
  'reinforce++': ('reinforce_plus_plus', {'kl_coef': 0.0}, None),
  'gigpo + ppo': ('gigpo', {'kl_coef': 0.0}, None),
  'jsd + ppo': ('jsd', {}, None),
  'gspo, by turns': (
    'gspo',
    {'kl_coef': 0.0, 'policy_loss': "gspo(level='turn')"},
    None,
  ),
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
    'teacher_logprobs': np.where(mask, old + 0.1, 0),
    'old_values': np.where(mask, 0.5, 0),
  }
  runs = np.arange(rows, dtype=np.int32)
  ids = {'group_ids': runs // GROUP, 'episode_ids': runs, 'turn_ids': 0 * runs}
  ids |= {'state_hash': runs % 3, 'pair_ids': runs // 2}
  batch = {name: x.astype(np.float32) for name, x in reals.items()}
  batch |= {**ids, 'mask': mask, 'expert_mask': runs % GROUP == 0}
  batch['step'] = np.float32(50)
  return jax.tree.map(jnp.asarray, batch)


def program(algorithm: Algorithm, with_advantage: bool) -> Callable[..., Any]:
  """(logprobs, other columns) → the loss, its metrics, the gradient."""
  algorithm = requirements.with_length(algorithm, LENGTH)

  def value(logprobs, batch):
    batch = batch | {'logprobs': logprobs}
    if with_advantage and algorithm.advantage is not None:
      estimate = components.call_component(algorithm.advantage, batch)
      batch |= {'advantages': estimate.advantages}
    mask, total, metrics = batch['mask'], 0.0, {}
    mode = algorithm.aggregation
    token = token_weights(mask, mode=mode.name, **mode.options)
    mean = token_weights(mask)
    for part in (algorithm.policy_loss, algorithm.kl_loss):
      if part is None:
        continue
      result = components.call_component(part, batch)
      loss, part_metrics = result if isinstance(result, tuple) else (result, {})
      weights = token if loss.ndim == 2 else row_weights(mask)
      total += jnp.sum(weights * loss)
      for name, metric in part_metrics.items():
        of = mean if metric.ndim == 2 else row_weights(mask)
        metrics[name] = jnp.sum(of * metric) if metric.ndim else metric
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
  """label → ms, bytes and what bytes allow, of everything in one compiled call.

  ms: advantages, weights, loss, metrics and gradient; loss_ms: without advantages.
  least_mib: what must be moved, that is the columns its parts name read once and the
  gradient written once. floor_ms: that at the rate of a copy, measured beside it.
  mib: what the compiled program accesses.
  """
  batch = columns()
  logprobs, table = batch.pop('logprobs'), {}
  for label, (name, options, torch_ms) in CASES.items():
    algorithm = make_algorithm(name, options)
    rate = machine.memory_rate()
    slots = (algorithm.advantage, algorithm.policy_loss, algorithm.kl_loss)
    named = {c for part in slots if part for c in components.fields_of(part)} | {'mask'}
    if algorithm.advantage is not None:
      named.discard('advantages')  # made on the way
    read = sum(x.nbytes for c, x in batch.items() if c in named)
    least = read + 2 * logprobs.nbytes
    row = {'floor_ms': 1e3 * least / rate, 'least_mib': least / 2**20}
    row |= {'torch_ms': torch_ms} if torch_ms else {}
    for key, whole in (('loss_ms', False), ('ms', True)):
      function = jax.jit(program(algorithm, whole)).lower(logprobs, batch).compile()
      row[key] = _milliseconds(lambda f=function: f(logprobs, batch), repeats)
      cost = function.cost_analysis() or {}
      row['mib'] = cost.get('bytes accessed', 0.0) / 2**20
    row['share'] = row['floor_ms'] / row['ms']
    table[label] = row
  return table
