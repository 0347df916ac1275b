"""Reward normalisation with a choice of mean, standard deviation and clips."""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl.functional import reductions
from jaxrl.functional.advantages.group_relative import normalise_in_group
from jaxrl.functional.components import component
from jaxrl.types import Advantages, Array, PyTree

Over = Literal['none', 'group', 'batch', 'running']


def init_moments() -> dict[str, Array]:
  """Returns the state of running statistics before any reward was seen."""
  return {name: jnp.zeros(()) for name in ('count', 'mean', 'square')}


def update_moments(
  state: dict[str, Array], rewards: Array, group_ids: Array, episode_ids: Array
) -> dict[str, Array]:
  """Adds a batch of episodes to running statistics (Welford's algorithm, by batches).

  Args:
    state: 'count', 'mean' and 'square', the sum of squared deviations from the mean.
    rewards: `[B, T]` float, the reward at each token.
    group_ids: `[B]` int32, the group (task) of each row; −1 at padding rows.
    episode_ids: `[B]` int32, the episode of each row; −1 at padding rows.

  Returns:
    The next state.
  """
  returns = reductions.episode_returns(rewards, episode_ids)
  return _add(state, returns, reductions.group_of_episode(group_ids, episode_ids) >= 0)


def _add(state: dict[str, Array], returns: Array, runs: Array) -> dict[str, Array]:
  n, mean = jnp.sum(runs), reductions.masked_mean(returns, runs)
  square = jnp.sum(jnp.where(runs, jnp.square(returns - mean), 0))
  count = state['count'] + n
  gap, safe = mean - state['mean'], jnp.maximum(count, 1)
  return {
    'count': count,
    'mean': state['mean'] + gap * n / safe,
    'square': state['square'] + square + gap**2 * state['count'] * n / safe,
  }


@component(
  init_state=init_moments, group_relative=lambda options: options['mean'] == 'group'
)
def normalise(
  rewards: Array,
  mask: Array,
  group_ids: Array,
  episode_ids: Array,
  state: PyTree = None,
  *,
  mean: Over = 'group',
  std: Over = 'none',
  reward_clip: float | None = None,
  advantage_clip: float | None = None,
  whiten: bool = False,
) -> Advantages:
  """Computes A = (R − mean)/(std + 1e-6), each of choice (ROLL, arXiv 2506.06122).

  In order: R is clipped to ±reward_clip; mean and sample standard deviation are taken;
  the result is whitened over the batch's action tokens if asked for, and clipped to
  ±advantage_clip. A group of one has mean 0 and standard deviation 1. A batch of one
  episode has standard deviation 1. Where the rewards that a deviation is taken of are
  all equal, A = 0.

  Args:
    rewards: `[B, T]` float, the reward at each token.
    mask: `[B, T]` bool, True at action tokens.
    group_ids: `[B]` int32, the group (task) of each row; −1 at padding rows.
    episode_ids: `[B]` int32, the episode of each row; −1 at padding rows.
    state: From `init_moments` or of the batch before; 'running' needs it. The clipped
      returns of this batch are added to it before it serves.
    mean: What the mean is over: 'none', 'group', 'batch', or 'running' for all episodes
      so far.
    std: What the standard deviation is over, likewise.
    reward_clip: Clips R to ±reward_clip; None does not.
    advantage_clip: Clips A to ±advantage_clip; None does not.
    whiten: Whether to whiten over the batch's action tokens.

  Returns:
    Advantages `[B, T]`. `state` is the next state.
  """
  returns = reductions.episode_returns(rewards, episode_ids)
  if reward_clip is not None:
    returns = jnp.clip(returns, -reward_clip, reward_clip)
  tasks = reductions.group_of_episode(group_ids, episode_ids)
  if state is not None:
    state = _add(state, returns, tasks >= 0)
  over = {'group': tasks, 'batch': jnp.where(tasks < 0, -1, 0)}
  advantage = returns
  if mean != 'none':
    advantage = returns - _mean(mean, returns, over, state)
  if std != 'none':
    scale = _std(std, returns, over, state)
    advantage = jnp.where(scale > 0, advantage / (scale + reductions.EPSILON), 0)
  advantages = reductions.episode_to_tokens(advantage, episode_ids, mask)
  if whiten:
    advantages = reductions.whiten(advantages, jnp.asarray(mask, bool))
  if advantage_clip is not None:
    advantages = jnp.clip(advantages, -advantage_clip, advantage_clip)
  return Advantages(advantages, state=state)


def _mean(kind: str, returns: Array, over: dict[str, Array], state: PyTree) -> Array:
  if kind == 'running':
    return _running(state)['mean']
  if kind not in over:
    raise ValueError(f'mean is {kind!r}; it must be one of {Over.__args__}')
  stats = reductions.group_stats(returns, over[kind])
  return jnp.where((kind == 'group') & (stats.count == 1), 0, stats.mean)


def _std(kind: str, returns: Array, over: dict[str, Array], state: PyTree) -> Array:
  """Computes the standard deviation, `[B]` or a scalar; 0 if all rewards are equal."""
  if kind == 'running':
    moments = _running(state)
    variance = moments['square'] / jnp.maximum(moments['count'] - 1, 1)
    # The mean of equal rewards is off by rounding, and each then differs from it.
    rounding = reductions.EPSILON * jnp.maximum(jnp.abs(moments['mean']), 1)
    std = reductions.safe_sqrt(jnp.where(variance > rounding**2, variance, 0))
    return jnp.where(moments['count'] > 1, std, 1)
  if kind not in over:
    raise ValueError(f'std is {kind!r}; it must be one of {Over.__args__}')
  stats = reductions.group_stats(returns, over[kind])
  std = reductions.group_std(returns - stats.mean, over[kind], stats.count)
  return jnp.where(stats.count == 1, 1, std)


def _running(state: PyTree) -> dict[str, Array]:
  if state is None:
    raise ValueError("'running' statistics need `state`: see init_moments")
  return state


@component(group_relative=True)
def gdpo(
  mask: Array,
  group_ids: Array,
  episode_ids: Array,
  reward_terms: Array,
  reward_weights: Array,
  *,
  whiten: bool = True,
) -> Advantages:
  """Computes A = whiten(Σ_k w_k·(R_k − μ_k)/(s_k + 1e-6)) (GDPO, arXiv 2601.05242).

  Every reward is normalised in its group before they are added up, so that none drowns
  the others: answers with rewards (0, 2) and (1, 1) are equal to GRPO, and not to GDPO.
  The rewards are the terms of `rollout.rewards` and their weights; what shapers do to
  their sum has no effect. A group of one has R_k itself in the place of the quotient.

  Args:
    mask: `[B, T]` bool, True at action tokens.
    group_ids: `[B]` int32, the group (task) of each row; −1 at padding rows.
    episode_ids: `[B]` int32, the episode of each row; −1 at padding rows.
    reward_terms: `[B, K]` the score of each reward of a row's episode.
    reward_weights: `[B, K]` their weights, 0 where there is no reward.
    whiten: Whether to whiten the sum over the batch's action tokens, as the paper does.

  Returns:
    Advantages `[B, T]`.
  """
  tasks = reductions.group_of_episode(group_ids, episode_ids)

  def of_episode(column: Array) -> Array:
    # All its rows say the same, to the bit: a mean would make equal rewards unequal.
    return jnp.where(tasks < 0, 0, reductions.segment_max(column, episode_ids))

  def normalised(score: Array, weight: Array) -> Array:
    return of_episode(weight) * normalise_in_group(of_episode(score), tasks)[0]

  total = jnp.sum(jax.vmap(normalised, 1)(reward_terms, reward_weights), axis=0)
  advantages = reductions.episode_to_tokens(total, episode_ids, mask)
  if whiten:
    advantages = reductions.whiten(advantages, jnp.asarray(mask, bool))
  return Advantages(advantages)
