"""Turn-level advantages of episodes whose turns are rows, identified by turn_ids."""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl.functional import reductions
from jaxrl.functional.advantages.group_relative import (
  keep_varied_groups,
  normalise_in_group,
)
from jaxrl.functional.components import component
from jaxrl.types import Advantages, Array


def discounted_turn_returns(
  rewards: Array, episode_ids: Array, turn_ids: Array, gamma: Array | float
) -> Array:
  """Computes Σ_{j≥k} γ^{j−k} r_j over the rows of an episode from turn k on.

  Args:
    rewards: `[B]`, one number per row.
    episode_ids: `[B]` int32, the episode of each row; −1 at padding rows.
    turn_ids: `[B]` int32, the turn of each row within its episode.
    gamma: The discount γ.

  Returns:
    `[B]`; 0 at padding rows.
  """
  order = jnp.lexsort((turn_ids, episode_ids))
  runs = episode_ids[order]
  follows = jnp.concatenate([runs[1:] == runs[:-1], jnp.zeros(1, bool)])
  decay = jnp.where(follows, gamma, 0.0)

  def join(later, earlier):
    return later[0] * earlier[0], earlier[1] + earlier[0] * later[1]

  scan = jax.lax.associative_scan(join, (decay, rewards[order]), reverse=True)
  returns = jnp.zeros_like(rewards).at[order].set(scan[1])
  return jnp.where(episode_ids < 0, 0, returns)


def _rows(x: Array, mask: Array) -> Array:
  return jnp.where(mask, x[:, None], 0).astype(jnp.float32)


@component(group_relative=True)
def step_wise_grpo(
  rewards: Array,
  mask: Array,
  group_ids: Array,
  episode_ids: Array,
  turn_ids: Array,
  *,
  divide_by_steps: bool = False,
  std_threshold: float | None = None,
) -> Advantages:
  """Computes (R_last − μ)/(s + 1e-6) of the last turn, for all (arXiv 2505.17826).

  A group of one has μ = 0 and s = 1.

  Args:
    rewards: `[B, T]` float, the reward at each token.
    mask: `[B, T]` bool, True at action tokens.
    group_ids: `[B]` int32, the group (task) of each row; −1 at padding rows.
    episode_ids: `[B]` int32, the episode of each row; −1 at padding rows.
    turn_ids: `[B]` int32, the turn of each row within its episode.
    divide_by_steps: Whether to divide the advantage by the episode's number of turns.
    std_threshold: Groups of one and groups with s ≤ threshold are dropped from the
      loss; None drops none.

  Returns:
    Advantages `[B, T]`.
  """
  last = turn_ids == reductions.gather(
    reductions.segment_max(turn_ids, episode_ids), episode_ids
  )
  scores = reductions.segment_sum(
    jnp.where(last, jnp.sum(rewards, axis=-1), 0), episode_ids
  )
  tasks = reductions.group_of_episode(group_ids, episode_ids)
  advantage, std = normalise_in_group(scores, tasks)
  if divide_by_steps:
    steps = reductions.segment_sum(jnp.ones_like(scores), episode_ids)
    advantage = advantage / jnp.maximum(steps, 1)
  keep = keep_varied_groups(std, tasks, episode_ids, mask, std_threshold)
  return Advantages(
    reductions.episode_to_tokens(advantage, episode_ids, mask), None, keep
  )


@component(group_relative=True)
def gigpo(
  rewards: Array,
  mask: Array,
  group_ids: Array,
  episode_ids: Array,
  turn_ids: Array,
  state_hash: Array,
  *,
  omega: float = 1.0,
  gamma: float = 1.0,
  norm: Literal['none', 'std'] = 'none',
) -> Advantages:
  """Computes A = A_episode + ω·A_turn, groups within groups (GiGPO, arXiv 2505.10978).

  A_episode compares ΣR with the mean of the group's episodes; a group of one has mean 0
  and standard deviation 1. A_turn compares discounted returns with those of turns that
  started from the same state *in the same group*; a state met once has A_turn = 0.

  Args:
    rewards: `[B, T]` float, the reward at each token.
    mask: `[B, T]` bool, True at action tokens.
    group_ids: `[B]` int32, the group (task) of each row; −1 at padding rows.
    episode_ids: `[B]` int32, the episode of each row; −1 at padding rows.
    turn_ids: `[B]` int32, the turn of each row within its episode.
    state_hash: `[B]` int32, the hash of the state that each turn started from.
    omega: The weight ω of the turn term.
    gamma: The discount γ.
    norm: 'std' divides each term by its group's sample standard deviation.

  Returns:
    Advantages `[B, T]`.
  """
  if norm not in ('none', 'std'):
    raise ValueError(f"norm is {norm!r}; it must be 'none' or 'std'")
  scores = reductions.episode_returns(rewards, episode_ids)
  tasks = reductions.group_of_episode(group_ids, episode_ids)
  episode = _compare(scores, tasks, norm, keep_alone=True)
  returns = discounted_turn_returns(
    jnp.sum(rewards, axis=-1), episode_ids, turn_ids, gamma
  )
  step = _compare(returns, reductions.unique_pair_ids(group_ids, state_hash), norm)
  return Advantages(_rows(reductions.gather(episode, episode_ids) + omega * step, mask))


def _compare(x: Array, ids: Array, norm: str, *, keep_alone: bool = False) -> Array:
  """Normalizes x `[B]` in its group; a row alone in its group is kept or becomes 0."""
  stats = reductions.group_stats(x, ids)
  alone = (stats.count == 1) & keep_alone
  centred = jnp.where(ids < 0, 0, x - jnp.where(alone, 0, stats.mean))
  if norm == 'none':
    return centred
  std = jnp.where(alone, 1, reductions.group_std(centred, ids, stats.count))
  return centred / (std + reductions.EPSILON)


@component(group_relative=lambda options: options['over'] == 'group')
def step_reinforce(
  rewards: Array,
  mask: Array,
  group_ids: Array,
  episode_ids: Array,
  turn_ids: Array,
  *,
  gamma: float = 1.0,
  over: Literal['batch', 'group'] = 'batch',
) -> Advantages:
  """Computes A = (G − mean)/(std + 1e-6), G of single turns (ROLL, arXiv 2506.06122).

  G_k = Σ_{j≥k} γ^{j−k} r_j for turn k.

  Args:
    rewards: `[B, T]` float, the reward at each token.
    mask: `[B, T]` bool, True at action tokens.
    group_ids: `[B]` int32, the group (task) of each row; −1 at padding rows.
    episode_ids: `[B]` int32, the episode of each row; −1 at padding rows.
    turn_ids: `[B]` int32, the turn of each row within its episode.
    gamma: The discount γ.
    over: Mean and std are over the turns of the 'batch', or of the 'group', where a
      lone turn has mean 0 and standard deviation 1.

  Returns:
    Advantages `[B, T]`. `returns` is G.
  """
  returns = discounted_turn_returns(
    jnp.sum(rewards, axis=-1), episode_ids, turn_ids, gamma
  )
  if over == 'batch':
    advantage, _ = normalise_in_group(returns, jnp.where(episode_ids < 0, -1, 0))
  elif over == 'group':
    advantage, _ = normalise_in_group(returns, group_ids)
  else:
    raise ValueError(f"over is {over!r}; it must be 'batch' or 'group'")
  return Advantages(_rows(advantage, mask), _rows(returns, mask))


@component(group_relative=True)
def cod(
  rewards: Array,
  mask: Array,
  group_ids: Array,
  episode_ids: Array,
  turn_ids: Array,
  *,
  future: Literal['mean', 'sliding', 'discounted'] = 'mean',
  window: int = 2,
  gamma: float = 0.9,
) -> Advantages:
  """Computes A = G_k − mean of G_k for episodes in a row (cf. arXiv 1611.02779).

  An episode plays one task several times, one row each. The mean of G_k is over the
  group; in a group of one it is 0.

  Args:
    rewards: `[B, T]` float, the reward at each token.
    mask: `[B, T]` bool, True at action tokens.
    group_ids: `[B]` int32, the group (task) of each row; −1 at padding rows.
    episode_ids: `[B]` int32, the episode of each row; −1 at padding rows.
    turn_ids: `[B]` int32, the turn of each row within its episode.
    future: G_k is the 'mean' of the rewards of plays ≥ k; 'sliding', the mean of the
      next `window` of them; or 'discounted', Σ_{j≥k} γ^{j−k} r_j.
    window: The plays that 'sliding' averages, k included.
    gamma: The discount γ of 'discounted'.

  Returns:
    Advantages `[B, T]`. `returns` is G.
  """
  scores = jnp.sum(rewards, axis=-1)
  if future == 'discounted':
    returns = discounted_turn_returns(scores, episode_ids, turn_ids, gamma)
  elif future in ('mean', 'sliding'):
    reach = window if future == 'sliding' else episode_ids.shape[0]
    returns = _mean_ahead(scores, episode_ids, turn_ids, reach)
  else:
    raise ValueError(f'future is {future!r}; it must be mean, sliding or discounted')
  plays = reductions.unique_pair_ids(group_ids, turn_ids)
  centred = _compare(returns, plays, 'none', keep_alone=True)
  return Advantages(_rows(centred, mask), _rows(returns, mask))


def _mean_ahead(
  x: Array, episode_ids: Array, turn_ids: Array, reach: Array | int
) -> Array:
  """Averages x over each row and the next rows of its run, `reach` in all; `[B]`."""
  size = episode_ids.shape[0]
  ones = jnp.where(episode_ids < 0, 0.0, 1.0)
  left = discounted_turn_returns(
    ones, episode_ids, turn_ids, 1.0
  )  # rows from here to the run's end
  ahead = discounted_turn_returns(
    jnp.where(episode_ids < 0, 0, x), episode_ids, turn_ids, 1.0
  )
  order = jnp.lexsort((turn_ids, episode_ids))
  place = jnp.zeros_like(order).at[order].set(jnp.arange(size))
  count = jnp.minimum(left, reach)
  beyond = jnp.minimum(place + count.astype(place.dtype), size - 1)
  rest = jnp.where(left > count, ahead[order][beyond], 0)
  return (ahead - rest) / jnp.maximum(count, 1)
