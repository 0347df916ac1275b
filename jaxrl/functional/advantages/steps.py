"""Advantages of runs whose turns are rows of their own, told apart by step_ids."""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl.functional import groups
from jaxrl.functional.advantages.group import keep_rows, relative
from jaxrl.types import Advantages, Array


def step_returns(
  rewards: Array, run_ids: Array, step_ids: Array, gamma: Array | float
) -> Array:
  """`[B]` Σ_{j≥k} γ^{j−k} r_j for the row of step k: over its run's later rows too.

  rewards: `[B]`, one number a row. Padding rows, id −1, get 0.
  """
  order = jnp.lexsort((step_ids, run_ids))
  runs = run_ids[order]
  follows = jnp.concatenate([runs[1:] == runs[:-1], jnp.zeros(1, bool)])
  decay = jnp.where(follows, gamma, 0.0)

  def join(later, earlier):
    return later[0] * earlier[0], earlier[1] + earlier[0] * later[1]

  scan = jax.lax.associative_scan(join, (decay, rewards[order]), reverse=True)
  returns = jnp.zeros_like(rewards).at[order].set(scan[1])
  return jnp.where(run_ids < 0, 0, returns)


def _rows(x: Array, mask: Array) -> Array:
  return jnp.where(mask, x[:, None], 0).astype(jnp.float32)


def step_wise_grpo(
  rewards: Array,
  mask: Array,
  task_ids: Array,
  run_ids: Array,
  step_ids: Array,
  *,
  divide_by_steps: bool = False,
  std_threshold: float | None = None,
) -> Advantages:
  """(R_last − μ)/(s + 1e-6) of a run's last step, for all its steps (arXiv 2505.17826).

  rewards, mask: `[B, T]`. task_ids, run_ids, step_ids: `[B]`. divide_by_steps: the
  advantage is shared out over the run's steps. std_threshold: as in `grpo`.
  """
  last = step_ids == groups.spread(groups.largest(step_ids, run_ids), run_ids)
  scores = groups.total(jnp.where(last, jnp.sum(rewards, axis=-1), 0), run_ids)
  advantage, std = relative(scores, groups.run_tasks(task_ids, run_ids))
  if divide_by_steps:
    steps = groups.total(jnp.ones_like(scores), run_ids)
    advantage = advantage / jnp.maximum(steps, 1)
  keep = keep_rows(std, run_ids, mask, std_threshold)
  return Advantages(groups.to_tokens(advantage, run_ids, mask), None, keep)


def gigpo(
  rewards: Array,
  mask: Array,
  task_ids: Array,
  run_ids: Array,
  step_ids: Array,
  state_hash: Array,
  *,
  omega: float = 1.0,
  gamma: float = 1.0,
  norm: Literal['none', 'std'] = 'none',
) -> Advantages:
  """A = A_run + ω·A_step: groups of runs, and in them of steps (arXiv 2505.10978).

  A_run compares ΣR with the other runs of the task. A_step
  compares discounted step returns with those of steps that started from the same
  state, `state_hash`, *in the same task*; a state met once has A_step = 0.

  rewards, mask: `[B, T]`. task_ids, run_ids, step_ids, state_hash: `[B]`.
  norm: 'std' divides each term by its group's sample standard deviation.
  """
  if norm not in ('none', 'std'):
    raise ValueError(f"norm is {norm!r}; it must be 'none' or 'std'")
  scores = groups.run_returns(rewards, run_ids)
  episode = _compare(scores, groups.run_tasks(task_ids, run_ids), norm)
  returns = step_returns(jnp.sum(rewards, axis=-1), run_ids, step_ids, gamma)
  step = _compare(returns, groups.pair_up(task_ids, state_hash), norm)
  return Advantages(_rows(groups.spread(episode, run_ids) + omega * step, mask))


def _compare(x: Array, ids: Array, norm: str) -> Array:
  stats = groups.group_stats(x, ids)
  centred = jnp.where(ids < 0, 0, x - stats.mean)
  if norm == 'none':
    return centred
  return centred / (groups.group_std(centred, ids, stats.count) + groups.EPSILON)


def step_reinforce(
  rewards: Array,
  mask: Array,
  task_ids: Array,
  run_ids: Array,
  step_ids: Array,
  *,
  gamma: float = 1.0,
  over: Literal['batch', 'group'] = 'batch',
) -> Advantages:
  """A = (G − mean)/(std + 1e-6), G_k = Σ_{j≥k} γ^{j−k} r_j (ROLL, arXiv 2506.06122).

  G is of single steps, mean and std over the steps of the batch; over='group', over
  those of the task, and there a lone step has mean 0 and standard deviation 1.
  rewards, mask: `[B, T]`; the ids: `[B]`.
  """
  returns = step_returns(jnp.sum(rewards, axis=-1), run_ids, step_ids, gamma)
  if over == 'batch':
    advantage, _ = relative(returns, jnp.where(run_ids < 0, -1, 0))
  elif over == 'group':
    advantage, _ = relative(returns, task_ids)
  else:
    raise ValueError(f"over is {over!r}; it must be 'batch' or 'group'")
  return Advantages(_rows(advantage, mask), _rows(returns, mask))


def cod(
  rewards: Array,
  mask: Array,
  task_ids: Array,
  run_ids: Array,
  step_ids: Array,
  *,
  future: Literal['mean', 'sliding', 'discounted'] = 'mean',
  window: int = 2,
  gamma: float = 0.9,
) -> Advantages:
  """A = G_k − mean of G_k: what episode k does for later ones (cf. arXiv 1611.02779).

  Runs are of several episodes of one task, one a row. G_k is the mean of the rewards
  of episodes ≥ k; 'sliding' takes the mean of the next `window` of them, k included,
  'discounted' Σ_{j≥k} γ^{j−k} r_j. The mean of G_k is over the runs of the task.
  rewards, mask: `[B, T]`; the ids: `[B]`.
  """
  scores = jnp.sum(rewards, axis=-1)
  if future == 'discounted':
    returns = step_returns(scores, run_ids, step_ids, gamma)
  elif future in ('mean', 'sliding'):
    reach = window if future == 'sliding' else run_ids.shape[0]
    returns = _mean_ahead(scores, run_ids, step_ids, reach)
  else:
    raise ValueError(f'future is {future!r}; it must be mean, sliding or discounted')
  centred = _compare(returns, groups.pair_up(task_ids, step_ids), 'none')
  return Advantages(_rows(centred, mask), _rows(returns, mask))


def _mean_ahead(x: Array, run_ids: Array, step_ids: Array, reach: Array | int) -> Array:
  """`[B]` mean of x over the row and its run's next rows, `reach` rows in all."""
  size = run_ids.shape[0]
  ones = jnp.where(run_ids < 0, 0.0, 1.0)
  left = step_returns(ones, run_ids, step_ids, 1.0)  # rows from here to the run's end
  ahead = step_returns(jnp.where(run_ids < 0, 0, x), run_ids, step_ids, 1.0)
  order = jnp.lexsort((step_ids, run_ids))
  place = jnp.zeros_like(order).at[order].set(jnp.arange(size))
  count = jnp.minimum(left, reach)
  beyond = jnp.minimum(place + count.astype(place.dtype), size - 1)
  rest = jnp.where(left > count, ahead[order][beyond], 0)
  return (ahead - rest) / jnp.maximum(count, 1)
