"""Advantages relative to the other attempts at the same task."""

from typing import Literal

import jax.numpy as jnp

from jaxrl.functional import groups
from jaxrl.types import Advantages, Array

EPSILON = 1e-6


def grpo(
  rewards: Array,
  mask: Array,
  task_ids: Array,
  run_ids: Array,
  *,
  scale_by_std: bool = True,
  std_over: Literal['group', 'batch'] = 'group',
  std_threshold: float | None = None,
) -> Advantages:
  """Group-relative advantages, A = (R − μ)/(s + 1e-6) (arXiv 2402.03300).

  R is a run's total reward, μ and s the mean and sample standard deviation of R over
  the runs of its task. A group of one has μ = 0 and s = 1; a group whose rewards are
  all equal has A = 0 exactly.

  rewards, mask: `[B, T]`. task_ids, run_ids: `[B]`, −1 at padding rows.
  scale_by_std: False leaves out the division (Dr. GRPO, arXiv 2503.20783).
  std_over: 'batch' divides by s over all runs of the batch (Lite PPO).
  std_threshold: groups with s ≤ threshold are dropped from the loss.
  """
  returns = groups.run_returns(rewards, run_ids)
  tasks = groups.run_tasks(task_ids, run_ids)
  stats = groups.group_stats(returns, tasks)
  alone = stats.count == 1
  centred = returns - jnp.where(alone, 0, stats.mean)
  std = jnp.where(alone, 1, groups.group_std(centred, tasks, stats.count))
  if scale_by_std:
    centred = centred / (_scale(returns, tasks, std, std_over) + EPSILON)
  keep = None
  if std_threshold is not None:
    kept = groups.spread(std > std_threshold, run_ids)
    keep = jnp.broadcast_to(kept[:, None].astype(bool), mask.shape)
  metrics = {'group_std': groups.masked_mean(std, tasks >= 0)}
  return Advantages(groups.to_tokens(centred, run_ids, mask), None, keep, metrics)


def _scale(returns: Array, tasks: Array, std: Array, over: str) -> Array:
  if over == 'group':
    return std
  if over != 'batch':
    raise ValueError(f"std_over is {over!r}; it must be 'group' or 'batch'")
  runs = tasks >= 0
  return jnp.where(jnp.sum(runs) > 1, groups.masked_std(returns, runs), 1)


def opmd(
  rewards: Array,
  mask: Array,
  task_ids: Array,
  run_ids: Array,
  *,
  baseline: Literal['mean', 'logavgexp'] = 'mean',
  tau: float = 1.0,
) -> Advantages:
  """A = R − b, b the group's mean or τ·log-mean-exp(R/τ) (arXiv 2505.17826).

  A group of one has b = 0. rewards, mask: `[B, T]`; task_ids, run_ids: `[B]`.
  """
  returns = groups.run_returns(rewards, run_ids)
  tasks = groups.run_tasks(task_ids, run_ids)
  stats = groups.group_stats(returns, tasks)
  if baseline == 'mean':
    b = stats.mean
  elif baseline == 'logavgexp':
    top = groups.spread(groups.largest(returns, tasks), tasks)
    power = groups.exp((returns - top) / tau)
    average = groups.spread(groups.total(power, tasks), tasks) / jnp.maximum(
      stats.count, 1
    )
    b = top + tau * jnp.log(jnp.where(tasks < 0, 1, average))
    b = jnp.where(stats.equal, returns, b)
  else:
    raise ValueError(f"baseline is {baseline!r}; it must be 'mean' or 'logavgexp'")
  advantage = returns - jnp.where(stats.count == 1, 0, b)
  return Advantages(groups.to_tokens(advantage, run_ids, mask))
