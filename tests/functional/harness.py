"""Random ragged batches, and comparison of a function with its restatement.

A restatement is plain float64 numpy, written from the formula. Derivatives of a
restatement come from the complex step f'(x) = Im f(x + ih)/h, which has no rounding
error; what a paper stops the gradient of is written `sg(x)`, its real part: the
derivative is that of the surrogate with those factors held.

Every function meets the same BATCHES random batches, each option value of its in one
case at least. They hold ragged masks, rows without action tokens, padding rows with
rubbish in them, singleton and unequal groups, groups of equal rewards, and log-ratios
of ±50. An error is relative: |got − wanted| / scale ≤ 1e-5, where scale is |wanted|
itself for a value of one token, and the largest entry of the row or batch that was
added up to make a value, where several were. Numbers under 1e-7 pass for 0.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROWS, TOKENS, WORDS = 14, 7, 6
BATCHES = 200
STEP = 1e-30
TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
  """A function beside its restatement, `restated(columns, options)`."""

  name: str
  fn: Callable[..., Any]
  restated: Callable[..., Any]
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  steps: bool = False  # runs own several rows

  def __str__(self) -> str:
    options = ','.join(f'{k}={v}' for k, v in self.options.items())
    return f'{self.name}({options})'


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


@functools.cache
def stacked(steps: bool = False, spare: bool = False) -> dict[str, Any]:
  """All batches, `[BATCHES, …]` each column, not to be written to.

  spare: with more padding rows and tokens at the ends.
  """
  batches = [_batch(seed, steps) for seed in range(BATCHES)]
  batches = [padded(each) if spare else each for each in batches]
  return jax.tree.map(lambda *columns: np.stack(columns), *batches)


def each(fn: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
  """`fn` over stacked batches, one after the other, in one compiled program."""
  return jax.jit(lambda columns: jax.lax.map(fn, columns))


class Compiled:
  """A module whose functions are called as one compiled program each.

  Called directly, each of their operations would be compiled for every shape, which is
  most of what a test by hand costs.

  Args:
    module: The module. Arrays among the arguments are traced, others are constants.
  """

  def __init__(self, module: Any):
    self._module = module

  def __getattr__(self, name: str) -> Callable[..., Any]:
    fn = getattr(self._module, name)

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
      leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=lambda x: x is None)
      arrays = [isinstance(x, jax.Array | np.ndarray) for x in leaves]
      pairs = list(zip(leaves, arrays, strict=True))
      constants = tuple(None if is_array else x for x, is_array in pairs)
      program = _compiled(fn, tree, tuple(arrays), constants)
      return program([x for x, is_array in pairs if is_array])

    return run


@functools.cache
def _compiled(fn, tree, arrays, constants):
  """A program of the arrays among a call's arguments."""

  def call(inputs):
    rest = iter(inputs)
    pairs = zip(constants, arrays, strict=True)
    args, kwargs = tree.unflatten([next(rest) if a else x for x, a in pairs])
    return fn(*args, **kwargs)

  return jax.jit(call)


def with_one_policy(columns: Mapping[str, Any]) -> dict[str, Any]:
  """The same columns, with every other policy's log-probs exactly the policy's own.

  So are the critic's old values its own.
  """
  names = ('old_logprobs', 'rollout_logprobs', 'ref_logprobs', 'teacher_logprobs')
  same = dict(columns) | dict.fromkeys(names, columns['logprobs'])
  return same | ({'old_values': columns['values']} if 'values' in columns else {})


def end_to_end(columns: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Stacked batches as one long one: for functions whose rows do not meet."""
  return {
    name: x.reshape(-1, *x.shape[2:])
    for name, x in columns.items()
    if not isinstance(x, dict) and x.shape[1:2] == (ROWS,)
  }


def unstacked(columns: Any) -> list[Any]:
  """The batches of stacked columns, one by one."""
  count = len(jax.tree.leaves(columns)[0])
  return [jax.tree.map(lambda x, i=i: x[i], columns) for i in range(count)]


def batch(seed: int, steps: bool = False) -> dict[str, np.ndarray]:
  """Columns of a random batch with every awkward case in it somewhere."""
  return dict(_batch(seed, steps))


@functools.cache
def _batch(seed: int, steps: bool) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(seed)
  rows = int(rng.integers(5, ROWS + 1))
  episode_ids, turn_ids = _runs(rng, rows, steps)
  runs = episode_ids.max() + 1
  # Group sizes are unequal; with 4 in 10 batches every group is a singleton or so.
  tasks = rng.integers(0, max(1, int(runs / rng.uniform(1, 5))), size=runs)
  tasks = np.unique(tasks, return_inverse=True)[1]
  mask = rng.random((rows, TOKENS)) < 0.7
  mask[:, 0] = False
  mask[np.arange(TOKENS) >= rng.integers(2, TOKENS + 1, size=rows)[:, None]] = False
  mask[rng.random(rows) < 0.1] = False
  columns: dict[str, np.ndarray] = {
    'mask': mask,
    'episode_ids': episode_ids,
    'turn_ids': turn_ids,
    'group_ids': tasks[episode_ids],
    'rewards': _rewards(rng, mask, episode_ids, tasks),
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
  kind_tokens = np.where(expert, tokens[expert].sum(), tokens[~expert].sum())
  columns['term_scale'] = (tokens.sum() / np.maximum(kind_tokens, 1)).astype(np.float32)
  columns['step'] = np.full(ROWS, rng.integers(0, 300), np.int32)
  columns |= _further(rng)
  version = np.maximum(columns['step'][:, None] - rng.integers(0, 6, (ROWS, TOKENS)), 0)
  columns['role_ids'] = np.where(
    columns['episode_ids'] < 0, -1, rng.integers(0, 3, ROWS)
  )
  columns['role_ids'] = columns['role_ids'].astype(np.int32)
  columns['sum_pi_squared'] = rng.random((ROWS, TOKENS)).astype(np.float32)
  episodes = np.maximum(columns['episode_ids'], 0)
  scores = rng.choice([0.0, 1.0, 0.7, -2.4], size=(ROWS, 3))
  columns['reward_terms'] = scores[episodes].astype(np.float32)
  weights = np.array([1.0, 0.5, -0.25], np.float32)
  columns['reward_weights'] = np.tile(weights, (ROWS, 1))
  columns['state'] = columns['state'] | {'baseline': np.float32(rng.normal(size=8))}
  columns['step_ends'] = rng.random((ROWS, TOKENS)) < 0.4
  columns['weights_version'] = np.where(columns['mask'], version, -1).astype(np.int32)
  return columns


def _further(rng) -> dict[str, Any]:
  """Columns of other shapes: over a vocabulary, over rows, and single numbers."""
  shape = (ROWS, TOKENS)
  near = rng.normal(size=(2, *shape, WORDS)) * rng.choice([0.1, 1, 15])
  dealt = np.log(rng.dirichlet(np.ones(WORDS), size=(2, *shape)))
  state = {
    'count': rng.integers(0, 9),
    'mean': rng.normal(),
    'square': rng.random(),
    'scale': rng.random(),
  }
  more = {
    'logits': near[0],
    'ref_logits': near[1],
    'topk_logprobs': dealt[0][..., : WORDS - 2],
    'teacher_topk_logprobs': dealt[1][..., : WORDS - 2],
    'lengths': 1.0 * rng.integers(0, 12, ROWS),
    'beta': rng.random(),
    'kl': rng.exponential() * rng.choice([0.1, 6, 50]),
    'n': 1.0 * rng.integers(1, 500),
    'num_rows': 1.0 * rng.integers(1, 500),
    'state': state,
  }
  key = np.array([0, rng.integers(2**31)], np.uint32)
  return jax.tree.map(lambda x: np.asarray(x, np.float32), more) | {'key': key}


def _runs(rng, rows, steps):
  if not steps:
    return rng.permutation(rows), np.zeros(rows, int)
  episode_ids = np.unique(
    rng.integers(0, max(1, rows // 2), rows), return_inverse=True
  )[1]
  turn_ids = np.array([np.sum(episode_ids[:i] == episode_ids[i]) for i in range(rows)])
  return episode_ids, turn_ids


def _rewards(rng, mask, episode_ids, tasks):
  """On the last action token of each row, now and then also earlier."""
  values = rng.choice([0.0, 1.0, 0.7, rng.normal()], size=mask.shape)
  last = mask & (np.cumsum(mask[:, ::-1], axis=1)[:, ::-1] == 1)
  rewards = np.where(last | (mask & (rng.random(mask.shape) < 0.2)), values, 0)
  for task in range(tasks.max() + 1):
    if rng.random() < 0.3:  # a group without variance
      rewards = np.where((tasks[episode_ids] == task)[:, None], last * 0.7, rewards)
  return rewards


def _grow(name, column, rng):
  """Adds padding rows: ids −1, mask 0, and rubbish in every other column."""
  extra = ROWS - len(column)
  shape = (extra, *column.shape[1:])
  if name in ('group_ids', 'episode_ids', 'turn_ids', 'state_hash'):
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
  return jax.tree.map(
    lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, dict(columns)
  )


def call(case: Case, columns: Mapping[str, Any]) -> Any:
  """Calls the function under test with the columns it names."""
  from jaxrl.functional import components

  return components.call_component(case.fn, columns, case.options)


def loss_and_gradient(case: Case, argument: str = 'logprobs', jit: bool = True):
  """(columns, weights) -> (what the part returns, gradient of Σ w·loss)."""

  def weighted(x, columns, weights):
    out = call(case, columns | {argument: x})
    return jnp.sum(weights * first(out)), out

  def run(columns, weights):
    gradient = jax.grad(weighted, has_aux=True)
    return gradient(columns[argument], columns, weights)[::-1]

  return jax.jit(run) if jit else run


def first(out: Any) -> Any:
  """The loss, of a part that returns metrics too or not."""
  return out[0] if isinstance(out, tuple) else out


def restated_gradient(case: Case, columns, weights, argument: str = 'logprobs'):
  """d Σ w·loss / d argument, by complex steps.

  Of `[B, T]` all rows take a step at once, of `[B, T, V]` all tokens: losses are
  those of single rows, or of single tokens where they are given whole distributions.
  """
  x = columns[argument]
  gradient = np.zeros(x.shape)
  for i in range(x.shape[-1]):
    step = np.zeros(x.shape[-1], complex)
    step[i] = 1j * STEP
    loss = case.restated(columns | {argument: x + step}, case.options)
    slope = weights * np.imag(loss) / STEP
    gradient[..., i] = slope.sum(axis=1) if x.ndim == 2 else slope
  return gradient


def random_weights(columns) -> np.ndarray:
  """`[B, T]` 0 where the mask is not set, as an aggregation's are."""
  rng = np.random.default_rng(0)
  mask = columns['mask']
  return np.where(mask, rng.random(mask.shape), 0).astype(np.float32)


def assert_close(got, wanted, scale=0.0, what=''):
  """|got − wanted| ≤ 1e-5·max(|wanted|, scale) + 1e-7, everything finite."""
  got, wanted = np.asarray(got, np.float64), np.asarray(wanted)
  assert got.shape == wanted.shape, f'{what}: {got.shape} instead of {wanted.shape}'
  assert np.all(np.isfinite(got)), f'{what}: not finite: {got[~np.isfinite(got)]}'
  limit = TOLERANCE * np.maximum(np.abs(wanted), scale) + 1e-7
  excess = np.abs(got - wanted) - limit
  if np.any(excess > 0):
    worst = np.unravel_index(np.argmax(excess), got.shape)
    raise AssertionError(f'{what} at {worst}: {got[worst]}, not {wanted[worst]}')


def row_scale(x):
  """[B, 1] the largest magnitude of each row."""
  return np.max(np.abs(x), axis=-1, keepdims=True)


def permuted(columns, order):
  return {
    k: v[order] if getattr(v, 'shape', ())[:1] == (ROWS,) else v
    for k, v in columns.items()
  }


def reordered(column, order):
  """A stacked column with each batch's rows in another order."""
  is_rows = not isinstance(column, dict) and column.shape[1:2] == order.shape
  return column[:, order] if is_rows else column


def poisoned(columns, names):
  """Columns with NaN at every token that is no action; rewards in padding rows too."""
  there = columns['mask']
  out = {k: np.where(there, v, np.nan) if k in names else v for k, v in columns.items()}
  padding = (columns['episode_ids'] < 0)[..., None]
  out['rewards'] = np.where(padding, np.nan, columns['rewards'])
  return out


def padded(columns, rows=2, tokens=3):
  """Columns with more padding rows and padding tokens."""
  out = {}
  for name, column in columns.items():
    if isinstance(column, dict) or column.shape[:1] != (ROWS,):
      out[name] = column
      continue
    minus = -1 if column.dtype == np.int32 else 0
    widths = [(0, rows), (0, tokens), (0, 0)][: column.ndim]
    out[name] = np.pad(column, widths, constant_values=minus)
  return out
