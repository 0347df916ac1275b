"""Group-relative advantages compare the samples of a group with each other.

One rule holds for a group of a single sample in every advantage of this package: it has
nothing to be compared with, so its baseline is 0 and its scale 1, and the advantage is
the sample's own return. `std_threshold` drops such groups, as they carry no contrast.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl.functional import reductions
from jaxrl.functional.components import component
from jaxrl.types import Advantages, Array


@component(group_relative=True)
def grpo(
  rewards: Array,
  mask: Array,
  group_ids: Array,
  episode_ids: Array,
  rollout_logprobs: Array | None = None,
  *,
  scale_by_std: bool = True,
  std_over: Literal['group', 'batch'] = 'group',
  std_threshold: float | None = None,
  rank_penalty: float | None = None,
) -> Advantages:
  """Computes group-relative advantages, A = (R − μ)/(s + 1e-6) (arXiv 2402.03300).

  A group of one has μ = 0 and s = 1. A group whose rewards are all equal has A = 0
  exactly.

  Args:
    rewards: `[B, T]` float, the reward at each token.
    mask: `[B, T]` bool, True at action tokens.
    group_ids: `[B]` int32, the group (task) of each row; −1 at padding rows.
    episode_ids: `[B]` int32, the episode of each row; −1 at padding rows.
    rollout_logprobs: `[B, T]` log-probs by the engine that sampled; only `rank_penalty`
      needs them.
    scale_by_std: Whether to divide by s; False is Dr. GRPO (arXiv 2503.20783).
    std_over: 'batch' divides by s over all episodes of the batch (Lite PPO).
    std_threshold: Groups of one and groups with s ≤ threshold are dropped from the
      loss; None drops none.
    rank_penalty: ρ; R becomes R·(1 − ρ·rank/n) before everything else, where rank is
      the number of episodes of the group with a smaller sum of rollout_logprobs.

  Returns:
    Advantages `[B, T]`. `keep` is False in dropped groups. Metric 'group_std'.

  Raises:
    ValueError: If `rank_penalty` is set without rollout_logprobs.
  """
  returns = reductions.episode_returns(rewards, episode_ids)
  tasks = reductions.group_of_episode(group_ids, episode_ids)
  if rank_penalty is not None:
    if rollout_logprobs is None:
      raise ValueError('rank_penalty reads rollout_logprobs, which were not given')
    likelihood = reductions.segment_sum(
      reductions.row_sum(rollout_logprobs, mask), episode_ids
    )
    count = reductions.group_stats(returns, tasks).count
    share = reductions.rank_in_group(likelihood, tasks) / jnp.maximum(count, 1)
    returns = returns * (1 - rank_penalty * share)
  advantage, std = normalise_in_group(
    returns, tasks, scale_by_std=scale_by_std, std_over=std_over
  )
  keep = keep_varied_groups(std, tasks, episode_ids, mask, std_threshold)
  metrics = {'group_std': reductions.masked_mean(std, tasks >= 0)}
  return Advantages(
    reductions.episode_to_tokens(advantage, episode_ids, mask), None, keep, metrics
  )


def normalise_in_group(
  returns: Array, tasks: Array, *, scale_by_std: bool = True, std_over: str = 'group'
) -> tuple[Array, Array]:
  """Normalises a number per episode within its group.

  Args:
    returns: `[B]` by episode.
    tasks: `[B]` the group of each episode; −1 where there is none.
    scale_by_std: Whether to divide by s; False is Dr. GRPO (arXiv 2503.20783).
    std_over: 'batch' divides by s over all episodes of the batch (Lite PPO).

  Returns:
    The normalised numbers and the standard deviation of their group, both `[B]` by
    episode.
  """
  stats = reductions.group_stats(returns, tasks)
  alone = stats.count == 1
  centred = returns - jnp.where(alone, 0, stats.mean)
  std = jnp.where(alone, 1, reductions.group_std(centred, tasks, stats.count))
  if not scale_by_std:
    return centred, std
  if std_over == 'group':
    return centred / (std + reductions.EPSILON), std
  if std_over != 'batch':
    raise ValueError(f"std_over is {std_over!r}; it must be 'group' or 'batch'")
  runs = tasks >= 0
  whole = jnp.where(jnp.sum(runs) > 1, reductions.masked_std(returns, runs), 1)
  return centred / (whole + reductions.EPSILON), std


def keep_varied_groups(
  std: Array, tasks: Array, episode_ids: Array, mask: Array, threshold: float | None
) -> Array | None:
  """Returns which tokens to keep when groups without contrast are dropped.

  A group of one has no contrast, whatever its standard deviation is taken to be.

  Args:
    std: `[B]` standard deviation of the group of each episode.
    tasks: `[B]` the group of each episode; −1 where there is none.
    episode_ids: `[B]` int32, the episode of each row; −1 at padding rows.
    mask: `[B, T]` bool, True at action tokens.
    threshold: Groups with std ≤ threshold are dropped; None drops none.

  Returns:
    `[B, T]` bool, or None without a threshold.
  """
  if threshold is None:
    return None
  compared = reductions.group_stats(std, tasks).count > 1
  kept = reductions.gather(compared & (std > threshold), episode_ids).astype(bool)
  return jnp.broadcast_to(kept[:, None], mask.shape)


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
def clip_b(
  rewards: Array,
  mask: Array,
  group_ids: Array,
  episode_ids: Array,
  old_logprobs: Array,
  entropy: Array,
  *,
  mu: float = 2.5,
) -> Advantages:
  """Computes GRPO without tokens with A < 0 and S < mean(S) − μσ (arXiv 2602.03392).

  S_t = e^p(H + p) tells how a token's update moves the entropy. Tokens with A < 0 and S
  < mean(S) − μσ are dropped, σ being the population standard deviation of S over action
  tokens. A is that of `grpo`, so a group of one has A = R.

  Args:
    rewards: `[B, T]` float, the reward at each token.
    mask: `[B, T]` bool, True at action tokens.
    group_ids: `[B]` int32, the group (task) of each row; −1 at padding rows.
    episode_ids: `[B]` int32, the episode of each row; −1 at padding rows.
    old_logprobs: `[B, T]` log-probs by the policy before the update.
    entropy: `[B, T]` entropy of the distribution that predicted each token.
    mu: The factor μ on the standard deviation σ.

  Returns:
    Advantages `[B, T]`. Metric 'dropped'.
  """
  out = grpo(rewards, mask, group_ids, episode_ids)
  mask = jnp.asarray(mask, bool)
  s = jnp.where(
    mask, reductions.clipped_exp(old_logprobs) * (entropy + old_logprobs), 0
  )
  centred = jnp.where(mask, s - reductions.masked_mean(s, mask), 0)
  sigma = reductions.safe_sqrt(reductions.masked_mean(centred**2, mask))
  drop = mask & (out.advantages < 0) & (centred < -mu * sigma)
  return _without(out, drop, mask)


@component(group_relative=True)
def clip_v(
  rewards: Array,
  mask: Array,
  group_ids: Array,
  episode_ids: Array,
  old_logprobs: Array,
  entropy: Array,
  nec: Array,
  *,
  mu: float = 8.5,
  max_frac: float = 1e-4,
  drop_zero: bool = False,
) -> Advantages:
  """Computes GRPO without tokens with A < 0 and NEC − S > μσ (arXiv 2602.03392).

  Tokens with A < 0 and D = NEC − S > μσ are dropped, with S as in `clip_b` and σ the
  population standard deviation of D over action tokens. When too many would be dropped,
  the max(⌊max_frac·tokens⌋, 1) with the largest D are. A is that of `grpo`, so a group
  of one has A = R.

  Tokens with A = 0 stay, and count in the denominator, KL and entropy: by the paper's
  Theorem 3.3 an update moves the entropy by −η·r·A·(S − E[S]), so theirs moves nothing;
  of KL and entropy terms it says nothing. Trinity-RFT 0.6.0 drops those with D > μσ
  too, however many there are, although its `clipb` keeps them.

  Args:
    rewards: `[B, T]` float, the reward at each token.
    mask: `[B, T]` bool, True at action tokens.
    group_ids: `[B]` int32, the group (task) of each row; −1 at padding rows.
    episode_ids: `[B]` int32, the episode of each row; −1 at padding rows.
    old_logprobs: `[B, T]` log-probs by the policy before the update.
    entropy: `[B, T]` entropy of the distribution that predicted each token.
    nec: `[B, T]` Σ_v p_v²(H + log p_v), the mean of S under the policy; see
      `entropy.nec`.
    mu: The factor μ on the standard deviation σ.
    max_frac: The largest share of action tokens to drop.
    drop_zero: Whether tokens with A = 0 and D > μσ are dropped too, beyond `max_frac`.

  Returns:
    Advantages `[B, T]`. Metric 'dropped'.
  """
  out = grpo(rewards, mask, group_ids, episode_ids)
  mask = jnp.asarray(mask, bool)
  s = reductions.clipped_exp(old_logprobs) * (entropy + old_logprobs)
  d = jnp.where(mask, nec - s, 0)
  centred = jnp.where(mask, d - reductions.masked_mean(d, mask), 0)
  sigma = reductions.safe_sqrt(reductions.masked_mean(centred**2, mask))
  is_far = mask & (sigma > 1e-12) & (d > mu * sigma)  # all equal: none is far
  drop = is_far & (out.advantages < 0)
  most = jnp.maximum(jnp.floor(max_frac * jnp.sum(mask)), 1).astype(jnp.int32)
  place = jnp.where(
    drop, reductions.float_order_bits(d), -1
  )  # d > 0 where it is dropped
  drop &= place >= reductions.largest_float_where(
    lambda bound: jnp.sum(place >= bound) >= most
  )
  if drop_zero:
    drop |= is_far & (out.advantages == 0)
  return _without(out, drop, mask)


def _without(out: Advantages, drop: Array, mask: Array) -> Advantages:
  metrics = out.metrics | {'dropped': reductions.masked_mean(1.0 * drop, mask)}
  return Advantages(out.advantages, None, ~drop, metrics)
