"""Group baselines compare a return with its group in other ways than GRPO does.

A group of a single sample is treated as in `group_relative`.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl.functional import reductions
from jaxrl.functional.advantages.token_level import returns_to_go
from jaxrl.functional.components import component
from jaxrl.types import Advantages, Array


@component(group_relative=True)
def opmd(
  rewards: Array,
  mask: Array,
  group_ids: Array,
  episode_ids: Array,
  *,
  baseline: Literal['mean', 'logavgexp'] = 'mean',
  tau: float = 1.0,
) -> Advantages:
  """Computes A = R − b with a group baseline b (OPMD, arXiv 2505.17826).

  b is the mean or τ·log-mean-exp(R/τ); a group of one has b = 0.

  Args:
    rewards: `[B, T]` float, the reward at each token.
    mask: `[B, T]` bool, True at action tokens.
    group_ids: `[B]` int32, the group (task) of each row; −1 at padding rows.
    episode_ids: `[B]` int32, the episode of each row; −1 at padding rows.
    baseline: 'mean' or 'logavgexp'.
    tau: The temperature τ of the log-mean-exp.

  Returns:
    Advantages `[B, T]`.
  """
  returns = reductions.episode_returns(rewards, episode_ids)
  tasks = reductions.group_of_episode(group_ids, episode_ids)
  stats = reductions.group_stats(returns, tasks)
  if baseline == 'mean':
    b = stats.mean
  elif baseline == 'logavgexp':
    top = reductions.gather(reductions.segment_max(returns, tasks), tasks)
    power = reductions.clipped_exp((returns - top) / tau)
    average = reductions.gather(reductions.segment_sum(power, tasks), tasks)
    average = average / jnp.maximum(stats.count, 1)
    b = top + tau * jnp.log(jnp.where(tasks < 0, 1, average))
    b = jnp.where(stats.equal, returns, b)
  else:
    raise ValueError(f"baseline is {baseline!r}; it must be 'mean' or 'logavgexp'")
  advantage = returns - jnp.where(stats.count == 1, 0, b)
  return Advantages(reductions.episode_to_tokens(advantage, episode_ids, mask))


@component(group_relative=True)
def asymre(
  rewards: Array,
  mask: Array,
  group_ids: Array,
  episode_ids: Array,
  *,
  shift: float = -0.1,
) -> Advantages:
  """Computes A = R − (μ + shift), asymmetric REINFORCE (arXiv 2506.20520).

  With a negative shift successes count for more than failures. A group of one has
  baseline 0; a group of equal rewards has A = −shift.

  Args:
    rewards: `[B, T]` float, the reward at each token.
    mask: `[B, T]` bool, True at action tokens.
    group_ids: `[B]` int32, the group (task) of each row; −1 at padding rows.
    episode_ids: `[B]` int32, the episode of each row; −1 at padding rows.
    shift: What is added to the baseline.

  Returns:
    Advantages `[B, T]`.
  """
  returns = reductions.episode_returns(rewards, episode_ids)
  stats = reductions.group_stats(
    returns, reductions.group_of_episode(group_ids, episode_ids)
  )
  advantage = (returns - stats.mean) - shift
  advantage = jnp.where(stats.count == 1, returns, advantage)
  return Advantages(reductions.episode_to_tokens(advantage, episode_ids, mask))


@component(group_relative=True)
def rloo(
  rewards: Array, mask: Array, group_ids: Array, episode_ids: Array
) -> Advantages:
  """Computes A = (R − μ)·n/(n−1), leave-one-out REINFORCE (arXiv 2402.14740).

  That is R minus the mean of the other episodes of the group. A group of one has
  baseline 0.

  Args:
    rewards: `[B, T]` float, the reward at each token.
    mask: `[B, T]` bool, True at action tokens.
    group_ids: `[B]` int32, the group (task) of each row; −1 at padding rows.
    episode_ids: `[B]` int32, the episode of each row; −1 at padding rows.

  Returns:
    Advantages `[B, T]`.
  """
  returns = reductions.episode_returns(rewards, episode_ids)
  stats = reductions.group_stats(
    returns, reductions.group_of_episode(group_ids, episode_ids)
  )
  n = stats.count
  others = (returns - stats.mean) * n / jnp.maximum(n - 1, 1)
  advantage = jnp.where(n == 1, returns, others)
  return Advantages(reductions.episode_to_tokens(advantage, episode_ids, mask))


@component(group_relative=True)
def maxrl(
  rewards: Array, mask: Array, group_ids: Array, episode_ids: Array
) -> Advantages:
  """Computes A = (R − μ)/μ, maximum likelihood RL (arXiv 2602.02710).

  Rare successes weigh as in the likelihood of success, about 1/μ, where GRPO's standard
  deviation weighs them by about 1/√μ. Rewards must not be negative: a group with μ ≤ 0
  has A = 0. A group of one has A = R.

  Args:
    rewards: `[B, T]` float, the reward at each token.
    mask: `[B, T]` bool, True at action tokens.
    group_ids: `[B]` int32, the group (task) of each row; −1 at padding rows.
    episode_ids: `[B]` int32, the episode of each row; −1 at padding rows.

  Returns:
    Advantages `[B, T]`.
  """
  returns = reductions.episode_returns(rewards, episode_ids)
  stats = reductions.group_stats(
    returns, reductions.group_of_episode(group_ids, episode_ids)
  )
  is_positive = stats.mean > 0
  scaled = (returns - stats.mean) / jnp.where(is_positive, stats.mean, 1)
  advantage = jnp.where(is_positive, scaled, 0)
  advantage = jnp.where(stats.count == 1, returns, advantage)
  return Advantages(reductions.episode_to_tokens(advantage, episode_ids, mask))


@component(group_relative=True)
def rec(
  rewards: Array,
  mask: Array,
  group_ids: Array,
  episode_ids: Array,
  key: Array | None = None,
  *,
  scale_by_std: bool = False,
  drop: Literal['none', 'balance'] = 'none',
) -> Advantages:
  """Computes A = R − μ, group-relative REINFORCE (REC, arXiv 2509.24203).

  With drop='balance', where episodes below the mean outnumber the others, the surplus
  is left out of the loss at random, and μ and s are those of the rest. A group of one
  has baseline 0.

  Args:
    rewards: `[B, T]` float, the reward at each token.
    mask: `[B, T]` bool, True at action tokens.
    group_ids: `[B]` int32, the group (task) of each row; −1 at padding rows.
    episode_ids: `[B]` int32, the episode of each row; −1 at padding rows.
    key: A JAX random key; only drop='balance' needs it.
    scale_by_std: Whether to divide by the population standard deviation.
    drop: 'none' or 'balance'.

  Returns:
    Advantages `[B, T]`. `keep` is False in dropped episodes.
  """
  returns = reductions.episode_returns(rewards, episode_ids)
  tasks = reductions.group_of_episode(group_ids, episode_ids)
  keep = None
  if drop == 'balance':
    if key is None:
      raise ValueError("drop='balance' draws at random: give it a key")
    dropped = _surplus(returns, tasks, key)
    tasks = jnp.where(dropped, -1, tasks)
    kept = ~reductions.gather(dropped, episode_ids).astype(bool)
    keep = jnp.broadcast_to(kept[:, None], mask.shape)
  elif drop != 'none':
    raise ValueError(f"drop is {drop!r}; it must be 'none' or 'balance'")
  stats = reductions.group_stats(returns, tasks)
  alone = stats.count == 1
  advantage = jnp.where(tasks < 0, 0, returns - jnp.where(alone, 0, stats.mean))
  if scale_by_std:
    square = reductions.gather(reductions.segment_sum(advantage**2, tasks), tasks)
    std = reductions.safe_sqrt(square / jnp.maximum(stats.count, 1))
    advantage = advantage / (jnp.where(alone, 1, std) + reductions.EPSILON)
  return Advantages(
    reductions.episode_to_tokens(advantage, episode_ids, mask), None, keep
  )


def _surplus(returns: Array, tasks: Array, key: Array) -> Array:
  """Returns a mask `[B]` of negatives to drop, to balance negatives and positives."""
  stats = reductions.group_stats(returns, tasks)
  # A reward that is the mean is below it in float32 as often as not.
  slack = reductions.EPSILON * jnp.maximum(jnp.abs(stats.mean), 1)
  negative = (tasks >= 0) & (returns < stats.mean - slack)
  ids = jnp.where(negative, tasks, -1)
  negatives = reductions.gather(reductions.segment_sum(1.0 * negative, ids), ids)
  surplus = 2 * negatives - stats.count
  return negative & (
    reductions.rank_in_group(jax.random.uniform(key, tasks.shape), ids) < surplus
  )


@component()
def best_of_group(
  rewards: Array,
  mask: Array,
  group_ids: Array,
  episode_ids: Array,
  *,
  threshold: float = 0.0,
) -> Advantages:
  """Computes A = 1[R = max of its group], without the rest (RAFT, arXiv 2304.06767).

  The sample of a group of one is its best, and is kept if R > threshold: nothing is
  subtracted here, so the rule for single samples has no effect.

  Args:
    rewards: `[B, T]` float, the reward at each token.
    mask: `[B, T]` bool, True at action tokens.
    group_ids: `[B]` int32, the group (task) of each row; −1 at padding rows.
    episode_ids: `[B]` int32, the episode of each row; −1 at padding rows.
    threshold: Episodes with R ≤ threshold are left out too.

  Returns:
    Advantages `[B, T]`. `keep` is False in the episodes left out. Metric 'kept'.
  """
  returns = reductions.episode_returns(rewards, episode_ids)
  tasks = reductions.group_of_episode(group_ids, episode_ids)
  top = reductions.gather(reductions.segment_max(returns, tasks), tasks)
  chosen = (tasks >= 0) & (returns == top) & (returns > threshold)
  advantage = reductions.episode_to_tokens(1.0 * chosen, episode_ids, mask)
  kept = reductions.gather(chosen, episode_ids).astype(bool)[:, None]
  metrics = {'kept': reductions.masked_mean(1.0 * chosen, tasks >= 0)}
  return Advantages(advantage, None, jnp.broadcast_to(kept, mask.shape), metrics)


@component(group_relative=True)
def optimal_token_baseline(
  rewards: Array,
  mask: Array,
  group_ids: Array,
  old_logprobs: Array,
  sum_pi_squared: Array,
) -> Advantages:
  """Computes A_t = G_t − Σ_i G_t W_t / Σ_i W_t over a group's rows (arXiv 2602.07078).

  W_t = Σ_{j≤t} ((1 − π_j)² + Σ_v π(v)² − π_j²), the squared norm of the gradient of the
  log-probs so far by the logits: rows whose gradient varies more count for more. G is
  the return-to-go. Token t is the t-th action token of its row, whatever stands
  between. Where only one row of the group is that long, the baseline is 0, so a group
  of one has A = G. verl calls it `optimal_token_baseline`, and with turns
  `tir_optimal_token_baseline`.

  Args:
    rewards: `[B, T]` float, the reward at each token.
    mask: `[B, T]` bool, True at action tokens.
    group_ids: `[B]` int32, the group (task) of each row; −1 at padding rows.
    old_logprobs: `[B, T]` log-probs log π by the policy before the update.
    sum_pi_squared: `[B, T]` Σ_v π(v)² of the distribution that predicted each token.

  Returns:
    Advantages `[B, T]`. `returns` is the return-to-go.
  """
  mask = jnp.asarray(mask, bool)
  returns = returns_to_go(rewards, mask, 1.0)
  logp = jnp.where(mask, jnp.minimum(old_logprobs, 0), 0)
  others = jnp.where(mask, sum_pi_squared, 0) - jnp.exp(2 * logp)
  energy = jnp.square(jnp.expm1(logp)) + others
  # At a temperature other than 1 the two distributions differ a little.
  weight = jnp.cumsum(jnp.where(mask, jnp.maximum(energy, 0), 0), axis=1)

  # Action tokens to the left, so that a column holds the t-th of every row.
  order = jnp.argsort(~mask, axis=1, stable=True)
  g, w, live = (jnp.take_along_axis(x, order, axis=1) for x in (returns, weight, mask))
  size = len(group_ids)
  ids = jnp.where(group_ids < 0, size, group_ids)

  def over_group(x: Array) -> Array:
    return jax.ops.segment_sum(jnp.where(live, x, 0), ids, size + 1)[ids]

  total, rows = over_group(w), over_group(jnp.ones_like(w))
  baseline = over_group(g * w) / (total + 1e-8)
  baseline = jnp.where(rows > 1, baseline, 0)
  back = jnp.argsort(order, axis=1)
  advantages = returns - jnp.take_along_axis(baseline, back, axis=1)
  there = mask & (group_ids >= 0)[:, None]
  return Advantages(jnp.where(there, advantages, 0), returns)
