"""Advantages relative to the other attempts at the same task."""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl.functional import groups
from jaxrl.types import Advantages, Array


def grpo(
  rewards: Array,
  mask: Array,
  task_ids: Array,
  run_ids: Array,
  rollout_logprobs: Array | None = None,
  *,
  scale_by_std: bool = True,
  std_over: Literal['group', 'batch'] = 'group',
  std_threshold: float | None = None,
  rank_penalty: float | None = None,
) -> Advantages:
  """Group-relative advantages, A = (R − μ)/(s + 1e-6) (arXiv 2402.03300).

  R is a run's total reward, μ and s the mean and sample standard deviation of R over
  the runs of its task. A group of one has μ = 0 and s = 1; a group whose rewards are
  all equal has A = 0 exactly.

  rewards, mask: `[B, T]`. task_ids, run_ids: `[B]`, −1 at padding rows.
  scale_by_std: False leaves out the division (Dr. GRPO, arXiv 2503.20783).
  std_over: 'batch' divides by s over all runs of the batch (Lite PPO).
  std_threshold: groups with s ≤ threshold are dropped from the loss.
  rank_penalty: ρ; R becomes R·(1 − ρ·rank/n) before everything else, where rank is
  how many of the n members have a smaller Σ of rollout_logprobs `[B, T]`.
  """
  returns = groups.run_returns(rewards, run_ids)
  tasks = groups.run_tasks(task_ids, run_ids)
  if rank_penalty is not None:
    if rollout_logprobs is None:
      raise ValueError('rank_penalty reads rollout_logprobs, which were not given')
    likelihood = groups.total(groups.row_sum(rollout_logprobs, mask), run_ids)
    count = groups.group_stats(returns, tasks).count
    share = groups.rank(likelihood, tasks) / jnp.maximum(count, 1)
    returns = returns * (1 - rank_penalty * share)
  advantage, std = relative(
    returns, tasks, scale_by_std=scale_by_std, std_over=std_over
  )
  keep = keep_rows(std, run_ids, mask, std_threshold)
  metrics = {'group_std': groups.masked_mean(std, tasks >= 0)}
  return Advantages(groups.to_tokens(advantage, run_ids, mask), None, keep, metrics)


def relative(
  returns: Array, tasks: Array, *, scale_by_std: bool = True, std_over: str = 'group'
) -> tuple[Array, Array]:
  """GRPO of numbers: (advantage, group standard deviation), both `[B]` by run."""
  stats = groups.group_stats(returns, tasks)
  alone = stats.count == 1
  centred = returns - jnp.where(alone, 0, stats.mean)
  std = jnp.where(alone, 1, groups.group_std(centred, tasks, stats.count))
  if not scale_by_std:
    return centred, std
  if std_over == 'group':
    return centred / (std + groups.EPSILON), std
  if std_over != 'batch':
    raise ValueError(f"std_over is {std_over!r}; it must be 'group' or 'batch'")
  runs = tasks >= 0
  whole = jnp.where(jnp.sum(runs) > 1, groups.masked_std(returns, runs), 1)
  return centred / (whole + groups.EPSILON), std


def keep_rows(
  std: Array, run_ids: Array, mask: Array, threshold: float | None
) -> Array | None:
  """`[B, T]` False in the rows of groups with std ≤ threshold; None without one."""
  if threshold is None:
    return None
  kept = groups.spread(std > threshold, run_ids).astype(bool)
  return jnp.broadcast_to(kept[:, None], mask.shape)


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
    average = groups.spread(groups.total(power, tasks), tasks)
    average = average / jnp.maximum(stats.count, 1)
    b = top + tau * jnp.log(jnp.where(tasks < 0, 1, average))
    b = jnp.where(stats.equal, returns, b)
  else:
    raise ValueError(f"baseline is {baseline!r}; it must be 'mean' or 'logavgexp'")
  advantage = returns - jnp.where(stats.count == 1, 0, b)
  return Advantages(groups.to_tokens(advantage, run_ids, mask))


def asymre(
  rewards: Array, mask: Array, task_ids: Array, run_ids: Array, *, shift: float = -0.1
) -> Advantages:
  """A = R − (μ + shift): successes count for more than failures (arXiv 2506.20520).

  Asymmetric REINFORCE. A group of one has baseline 0; a group of
  equal rewards has A = −shift. rewards, mask: `[B, T]`; task_ids, run_ids: `[B]`.
  """
  returns = groups.run_returns(rewards, run_ids)
  stats = groups.group_stats(returns, groups.run_tasks(task_ids, run_ids))
  advantage = (returns - stats.mean) - shift
  advantage = jnp.where(stats.count == 1, returns, advantage)
  return Advantages(groups.to_tokens(advantage, run_ids, mask))


def rloo(rewards: Array, mask: Array, task_ids: Array, run_ids: Array) -> Advantages:
  """A = (R − μ)·n/(n−1): R less the mean of the *other* members (arXiv 2402.14740).

  A group of one has baseline 0. rewards, mask: `[B, T]`; task_ids, run_ids: `[B]`.
  """
  returns = groups.run_returns(rewards, run_ids)
  stats = groups.group_stats(returns, groups.run_tasks(task_ids, run_ids))
  n = stats.count
  others = (returns - stats.mean) * n / jnp.maximum(n - 1, 1)
  advantage = jnp.where(n == 1, returns, others)
  return Advantages(groups.to_tokens(advantage, run_ids, mask))


def rec(
  rewards: Array,
  mask: Array,
  task_ids: Array,
  run_ids: Array,
  key: Array | None = None,
  *,
  scale_by_std: bool = False,
  drop: Literal['none', 'balance'] = 'none',
) -> Advantages:
  """A = R − μ, or that over the *population* deviation (arXiv 2509.24203).

  Group-relative REINFORCE. drop='balance': where members
  below the mean outnumber the others, the surplus, chosen by `key`, is left out of
  the loss, and μ and s are those of the rest. A group of one has baseline 0.

  rewards, mask: `[B, T]`. task_ids, run_ids: `[B]`. key: a JAX random key.
  """
  returns = groups.run_returns(rewards, run_ids)
  tasks = groups.run_tasks(task_ids, run_ids)
  keep = None
  if drop == 'balance':
    if key is None:
      raise ValueError("drop='balance' draws at random: give it a key")
    dropped = _surplus(returns, tasks, key)
    tasks = jnp.where(dropped, -1, tasks)
    kept = ~groups.spread(dropped, run_ids).astype(bool)
    keep = jnp.broadcast_to(kept[:, None], mask.shape)
  elif drop != 'none':
    raise ValueError(f"drop is {drop!r}; it must be 'none' or 'balance'")
  stats = groups.group_stats(returns, tasks)
  alone = stats.count == 1
  advantage = jnp.where(tasks < 0, 0, returns - jnp.where(alone, 0, stats.mean))
  if scale_by_std:
    square = groups.spread(groups.total(advantage**2, tasks), tasks)
    std = groups.safe_sqrt(square / jnp.maximum(stats.count, 1))
    advantage = advantage / (jnp.where(alone, 1, std) + groups.EPSILON)
  return Advantages(groups.to_tokens(advantage, run_ids, mask), None, keep)


def _surplus(returns: Array, tasks: Array, key: Array) -> Array:
  """`[B]` by run: True for negatives to drop so that they match the positives."""
  stats = groups.group_stats(returns, tasks)
  # A reward that is the mean is below it in float32 as often as not.
  slack = groups.EPSILON * jnp.maximum(jnp.abs(stats.mean), 1)
  negative = (tasks >= 0) & (returns < stats.mean - slack)
  ids = jnp.where(negative, tasks, -1)
  negatives = groups.spread(groups.total(1.0 * negative, ids), ids)
  surplus = 2 * negatives - stats.count
  return negative & (groups.rank(jax.random.uniform(key, tasks.shape), ids) < surplus)


def best(
  rewards: Array,
  mask: Array,
  task_ids: Array,
  run_ids: Array,
  *,
  threshold: float = 0.0,
) -> Advantages:
  """RAFT: A = 1[R = max of its group], and the rest left out (arXiv 2304.06767).

  A run is kept when R is its group's maximum and exceeds `threshold`.
  rewards, mask: `[B, T]`; task_ids, run_ids: `[B]`.
  """
  returns = groups.run_returns(rewards, run_ids)
  tasks = groups.run_tasks(task_ids, run_ids)
  top = groups.spread(groups.largest(returns, tasks), tasks)
  chosen = (tasks >= 0) & (returns == top) & (returns > threshold)
  advantage = groups.to_tokens(1.0 * chosen, run_ids, mask)
  kept = groups.spread(chosen, run_ids).astype(bool)[:, None]
  metrics = {'kept': groups.masked_mean(1.0 * chosen, tasks >= 0)}
  return Advantages(advantage, None, jnp.broadcast_to(kept, mask.shape), metrics)
