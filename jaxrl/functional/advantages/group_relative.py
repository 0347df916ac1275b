"""Group-relative advantages compare the samples of a group with each other.

One rule holds for a group of a single sample in every advantage of this package: it has
nothing to be compared with, so its baseline is 0 and its scale 1, and the advantage is
the sample's own return. `std_threshold` drops such groups, as they carry no contrast.
"""

from typing import Literal

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
