"""Random ragged batches, and comparison of a function with its restatement.

A restatement is plain float64 numpy, written from the formula. Derivatives of a
restatement come from the complex step f'(x) = Im f(x + ih)/h, which has no rounding
error; what a paper stops the gradient of is written `sg(x)`, its real part.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROWS, TOKENS = 14, 7
BATCHES = 200
STEP = 1e-30


@dataclasses.dataclass(frozen=True)
class Case:
  """A function beside its restatement, `restated(columns, options)`."""

  name: str
  fn: Callable[..., Any]
  restated: Callable[..., Any]
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  steps: bool = False  # runs own several rows

  def __str__(self) -> str:
    given = ','.join(f'{k}={v}' for k, v in self.options.items())
    return f'{self.name}({given})'


def seeds(case: Case, cases: list[Case]) -> range:
  """This case's share of the batches its function sees, at least BATCHES in all."""
  mine = [other for other in cases if other.name == case.name]
  share = max(-(-BATCHES // len(mine)), 40)
  start = share * mine.index(case)
  return range(start, start + share)


def sg(x):
  return np.real(x)


def clip(x, low, high):
  """np.clip for numbers that carry an imaginary derivative."""
  return np.where(sg(x) < low, low, np.where(sg(x) > high, high, x))


def cexp(x):
  return np.exp(clip(x, -20, 20))


def largest(x, y):
  return np.where(sg(x) >= sg(y), x, y)


def smallest(x, y):
  return np.where(sg(x) <= sg(y), x, y)


def batch(seed: int, steps: bool = False) -> dict[str, np.ndarray]:
  """Columns of a random batch with every awkward case in it somewhere."""
  return dict(_batch(seed, steps))


@functools.cache
def _batch(seed: int, steps: bool) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(seed)
  rows = int(rng.integers(5, ROWS + 1))
  run_ids, step_ids = _runs(rng, rows, steps)
  runs = run_ids.max() + 1
  # Group sizes are unequal; with 4 in 10 batches every group is a singleton or so.
  tasks = rng.integers(0, max(1, int(runs / rng.uniform(1, 5))), size=runs)
  tasks = np.unique(tasks, return_inverse=True)[1]
  mask = rng.random((rows, TOKENS)) < 0.7
  mask[:, 0] = False
  mask[np.arange(TOKENS) >= rng.integers(2, TOKENS + 1, size=rows)[:, None]] = False
  mask[rng.random(rows) < 0.1] = False
  columns: dict[str, np.ndarray] = {
    'mask': mask,
    'run_ids': run_ids,
    'step_ids': step_ids,
    'task_ids': tasks[run_ids],
    'rewards': _rewards(rng, mask, run_ids, tasks),
    'advantages': rng.normal(size=mask.shape) * (rng.random(mask.shape) < 0.9),
    'state_hash': rng.integers(0, 3, size=rows),
    'expert_mask': rng.random(rows) < 0.3,
    'greedy_mask': rng.random(rows) < 0.2,
  }
  p = -rng.exponential(size=mask.shape)
  columns['logprobs'] = p
  for name in ('old_logprobs', 'rollout_logprobs', 'ref_logprobs', 'teacher_logprobs'):
    drift = rng.normal(size=mask.shape) * rng.choice([1e-3, 0.1, 1.0])
    far = rng.random(mask.shape)
    drift = np.where(far < 0.03, 50, np.where(far > 0.97, -50, drift))
    columns[name] = p + drift
  for name in ('values', 'old_values', 'returns', 'entropy', 'nec'):
    columns[name] = rng.normal(size=mask.shape)
  columns['entropy'] = np.abs(columns['entropy'])
  order = rng.permutation(rows)
  columns = {k: v[order] for k, v in columns.items()}
  columns = {k: _cast(k, _grow(k, v, rng)) for k, v in columns.items()}
  expert, tokens = columns['expert_mask'], columns['mask'].sum(axis=1)
  own = np.where(expert, tokens[expert].sum(), tokens[~expert].sum())
  columns['term_scale'] = (tokens.sum() / np.maximum(own, 1)).astype(np.float32)
  columns['mu'] = np.full(ROWS, rng.random(), np.float32)
  return columns


def _runs(rng, rows, steps):
  if not steps:
    return rng.permutation(rows), np.zeros(rows, int)
  run_ids = np.unique(rng.integers(0, max(1, rows // 2), rows), return_inverse=True)[1]
  step_ids = np.array([np.sum(run_ids[:i] == run_ids[i]) for i in range(rows)])
  return run_ids, step_ids


def _rewards(rng, mask, run_ids, tasks):
  """On the last action token of each row, now and then also earlier."""
  values = rng.choice([0.0, 1.0, 0.7, rng.normal()], size=mask.shape)
  last = mask & (np.cumsum(mask[:, ::-1], axis=1)[:, ::-1] == 1)
  rewards = np.where(last | (mask & (rng.random(mask.shape) < 0.2)), values, 0)
  for task in range(tasks.max() + 1):
    if rng.random() < 0.3:  # a group without variance
      rewards = np.where((tasks[run_ids] == task)[:, None], last * 0.7, rewards)
  return rewards


def _grow(name, column, rng):
  """Adds padding rows: ids −1, mask 0, and rubbish in every other column."""
  extra = ROWS - len(column)
  shape = (extra, *column.shape[1:])
  if name in ('task_ids', 'run_ids', 'step_ids', 'state_hash'):
    filler = np.full(shape, -1)
  elif column.dtype == bool:
    filler = np.zeros(shape, bool)
  else:
    filler = rng.normal(size=shape)
  return np.concatenate([column, filler])


def _cast(name, column):
  if column.dtype == bool:
    return column
  return column.astype(np.float32 if column.ndim == 2 else np.int32)


def wide(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """The same columns in float64, for restatements."""
  return {
    k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in columns.items()
  }


def call(case: Case, columns: Mapping[str, Any]) -> Any:
  """Calls the function under test with the columns it names."""
  from jaxrl.algorithms import compose

  return compose.call_part(case.fn, columns, case.options)


def loss_and_gradient(case: Case, argument: str = 'logprobs'):
  """A jitted (columns, weights) -> (loss [B, T], gradient of Σ w·loss)."""

  def weighted(x, columns, weights):
    out = call(case, columns | {argument: x})
    loss = out[0] if isinstance(out, tuple) else out
    return jnp.sum(weights * loss), out

  @jax.jit
  def run(columns, weights):
    gradient = jax.grad(weighted, has_aux=True)
    return gradient(columns[argument], columns, weights)[::-1]

  return run


def restated_gradient(case: Case, columns, weights, argument: str = 'logprobs'):
  """d Σ w·loss / d argument: rows are independent, so T complex steps do."""
  gradient = np.zeros(weights.shape)
  for t in range(weights.shape[1]):
    step = np.zeros(weights.shape[1], complex)
    step[t] = 1j * STEP
    loss = case.restated(columns | {argument: columns[argument] + step}, case.options)
    gradient[:, t] = np.sum(weights * np.imag(loss) / STEP, axis=1)
  return gradient


def assert_close(got, wanted, scale=0.0, tolerance=1e-5, what=''):
  """|got − wanted| ≤ tolerance·(|wanted| + scale), everything finite."""
  got = np.asarray(got, np.float64)
  assert np.all(np.isfinite(got)), f'{what}: not finite: {got}'
  limit = tolerance * (np.abs(wanted) + scale) + 1e-7
  error = np.abs(got - wanted)
  worst = np.argmax(error - limit)
  pair = (
    f'{got.flat[worst]} instead of {np.broadcast_to(wanted, got.shape).flat[worst]}'
  )
  assert np.all(error <= limit), f'{what}: {pair}'


def row_scale(x):
  """[B, 1] the largest magnitude of each row."""
  return np.max(np.abs(x), axis=-1, keepdims=True)


def permuted(columns, order):
  return {k: v[order] for k, v in columns.items()}


def padded(columns, rows=2, tokens=3):
  """Columns with more padding rows and padding tokens."""
  out = {}
  for name, column in columns.items():
    minus = -1 if column.dtype == np.int32 else 0
    widths = [(0, rows)] + [(0, tokens)] * (column.ndim - 1)
    out[name] = np.pad(column, widths, constant_values=minus)
  return out
