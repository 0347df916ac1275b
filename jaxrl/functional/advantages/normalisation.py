"""Rewards normalised by choice: which mean, which deviation, which clips."""

from typing import Any, Literal

import jax.numpy as jnp

from jaxrl.functional import groups
from jaxrl.functional.marks import stateful
from jaxrl.types import Advantages, Array

Over = Literal['none', 'group', 'batch', 'running']


def init_moments() -> dict[str, Array]:
  """The state of running statistics before any reward was seen."""
  return {name: jnp.zeros(()) for name in ('count', 'mean', 'square')}


def update_moments(
  state: dict[str, Array], rewards: Array, task_ids: Array, run_ids: Array
) -> dict[str, Array]:
  """Adds a batch of runs to running statistics (Welford's, by batches).

  rewards: `[B, T]`. 'square' is the sum of squared deviations from 'mean'.
  """
  returns = groups.run_returns(rewards, run_ids)
  return _add(state, returns, groups.run_tasks(task_ids, run_ids) >= 0)


def _add(state: dict[str, Array], returns: Array, runs: Array) -> dict[str, Array]:
  n, mean = jnp.sum(runs), groups.masked_mean(returns, runs)
  square = jnp.sum(jnp.where(runs, jnp.square(returns - mean), 0))
  count = state['count'] + n
  gap, safe = mean - state['mean'], jnp.maximum(count, 1)
  return {
    'count': count,
    'mean': state['mean'] + gap * n / safe,
    'square': state['square'] + square + gap**2 * state['count'] * n / safe,
  }


@stateful(init_moments)
def normalise(
  rewards: Array,
  mask: Array,
  task_ids: Array,
  run_ids: Array,
  state: Any = None,
  *,
  mean: Over = 'group',
  std: Over = 'none',
  reward_clip: float | None = None,
  advantage_clip: float | None = None,
  whiten: bool = False,
) -> Advantages:
  """A = (R − mean)/(std + 1e-6), each taken as wished (ROLL, arXiv 2506.06122).

  mean, std: over nothing, the group, the batch or all runs so far. In order: R is
  clipped to ±reward_clip; mean and sample standard deviation are taken; the result is
  whitened over the batch's action tokens if asked for and clipped to ±advantage_clip.
  Where a single run is all there is, its deviation is 1; where rewards that a
  deviation is taken of are all equal, A = 0.

  rewards, mask: `[B, T]`. task_ids, run_ids: `[B]`. state: from `init_moments` or of
  the batch before, needed by 'running'. This batch's runs, clipped, are added to it
  before it serves, and it is returned.
  """
  returns = groups.run_returns(rewards, run_ids)
  if reward_clip is not None:
    returns = jnp.clip(returns, -reward_clip, reward_clip)
  tasks = groups.run_tasks(task_ids, run_ids)
  if state is not None:
    state = _add(state, returns, tasks >= 0)
  over = {'group': tasks, 'batch': jnp.where(tasks < 0, -1, 0)}
  advantage = returns
  if mean != 'none':
    advantage = returns - _mean(mean, returns, over, state)
  if std != 'none':
    scale = _std(std, returns, over, state)
    advantage = jnp.where(scale > 0, advantage / (scale + groups.EPSILON), 0)
  advantages = groups.to_tokens(advantage, run_ids, mask)
  if whiten:
    advantages = groups.whiten(advantages, jnp.asarray(mask, bool))
  if advantage_clip is not None:
    advantages = jnp.clip(advantages, -advantage_clip, advantage_clip)
  return Advantages(advantages, state=state)


def _mean(kind: str, returns: Array, over: dict[str, Array], state: Any) -> Array:
  if kind == 'running':
    return _running(state)['mean']
  if kind not in over:
    raise ValueError(f'mean is {kind!r}; it must be one of {Over.__args__}')
  return groups.group_stats(returns, over[kind]).mean


def _std(kind: str, returns: Array, over: dict[str, Array], state: Any) -> Array:
  """`[B]` or a number; 0 over rewards that are all equal."""
  if kind == 'running':
    moments = _running(state)
    variance = moments['square'] / jnp.maximum(moments['count'] - 1, 1)
    # The mean of equal rewards is off by rounding, and each then differs from it.
    rounding = groups.EPSILON * jnp.maximum(jnp.abs(moments['mean']), 1)
    std = groups.safe_sqrt(jnp.where(variance > rounding**2, variance, 0))
    return jnp.where(moments['count'] > 1, std, 1)
  if kind not in over:
    raise ValueError(f'std is {kind!r}; it must be one of {Over.__args__}')
  stats = groups.group_stats(returns, over[kind])
  std = groups.group_std(returns - stats.mean, over[kind], stats.count)
  return jnp.where(stats.count == 1, 1, std)


def _running(state: Any) -> dict[str, Array]:
  if state is None:
    raise ValueError("'running' statistics need `state`: see init_moments")
  return state
