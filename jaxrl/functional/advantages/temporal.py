"""Advantages that differ from token to token within a row."""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl.functional import groups, turns
from jaxrl.types import Advantages, Array


def gae(
  rewards: Array,
  old_values: Array,
  mask: Array,
  *,
  gamma: float = 1.0,
  lam: float = 1.0,
  whiten: bool = False,
) -> Advantages:
  """A_t = Σ_k (γλ)^k δ_{t+k}, over action tokens (arXiv 1506.02438).

  δ_t = r_t + γV_{t+1} − V_t and A_t = δ_t + γλA_{t+1}, where t+1 is the next *action*
  token of the row: observations and padding are stepped over. After the last one
  V = 0. returns = A + V, before any whitening.

  rewards, old_values, mask: `[B, T]`; V_t judges the state before token t.
  whiten: subtract the mean and divide by the standard deviation over action tokens.
  """
  mask = jnp.asarray(mask, bool)

  def back(carry, column):
    next_value, next_advantage = carry
    reward, value, action = column
    advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
    carry = (
      jnp.where(action, value, next_value),
      jnp.where(action, advantage, next_advantage),
    )
    return carry, jnp.where(action, advantage, 0)

  advantages = _scan_back(back, 2, rewards, old_values, mask)
  returns = jnp.where(mask, advantages + old_values, 0)
  if whiten:
    advantages = groups.whiten(advantages, mask)
  return Advantages(advantages, returns)


def _scan_back(step, carries: int, *columns: Array) -> Array:
  """Runs `step` from the last token of `[B, T]` columns to the first."""
  zero = jnp.zeros(columns[0].shape[0], jnp.float32)
  columns = tuple(column.T for column in columns)
  start = (zero,) * carries
  return jax.lax.scan(step, start, columns, reverse=True, unroll=8)[1].T


def returns_to_go(rewards: Array, mask: Array, gamma: Array | float) -> Array:
  """`[B, T]` Σ_{k≥t} γ^{k−t} r_k, counting action tokens only; 0 elsewhere."""

  def back(carry, column):
    reward, action = column
    total = jnp.where(action, reward + gamma * carry[0], carry[0])
    return (total,), jnp.where(action, total, 0)

  return _scan_back(back, 1, rewards, jnp.asarray(mask, bool))


def reinforce(
  rewards: Array,
  mask: Array,
  run_ids: Array,
  *,
  gamma: float | None = None,
) -> Advantages:
  """A = R, the run's total reward, at every token (Williams, 1992).

  gamma: when rewards are per token, the discounted return-to-go
  Σ_{k≥t} γ^{k−t} r_k over the action tokens of the row instead.
  rewards, mask: `[B, T]`. run_ids: `[B]`.
  """
  if gamma is not None:
    advantages = returns_to_go(rewards, mask, gamma)
  else:
    returns = groups.run_returns(rewards, run_ids)
    advantages = groups.to_tokens(returns, run_ids, mask)
  return Advantages(advantages, advantages)


def reinforce_plus_plus(
  rewards: Array,
  mask: Array,
  task_ids: Array,
  run_ids: Array,
  *,
  gamma: float = 1.0,
  baseline: Literal['none', 'group'] = 'none',
) -> Advantages:
  """A = whiten(Σ_k γ^k r_{t+k}) over the batch's action tokens (arXiv 2501.03262).

  baseline: 'group' first subtracts the mean total reward of the runs of the task.
  rewards, mask: `[B, T]`. task_ids, run_ids: `[B]`.
  """
  returns = returns_to_go(rewards, mask, gamma)
  advantages = returns
  if baseline == 'group':
    scores = groups.run_returns(rewards, run_ids)
    stats = groups.group_stats(scores, groups.run_tasks(task_ids, run_ids))
    advantages = returns - groups.to_tokens(stats.mean, run_ids, mask)
  elif baseline != 'none':
    raise ValueError(f"baseline is {baseline!r}; it must be 'none' or 'group'")
  return Advantages(groups.whiten(advantages, jnp.asarray(mask, bool)), returns)


def remax(
  rewards: Array,
  mask: Array,
  task_ids: Array,
  run_ids: Array,
  greedy_mask: Array,
  *,
  gamma: float = 1.0,
) -> Advantages:
  """A_t = Σ_k γ^k r_{t+k} − R of the task's greedy rollout (arXiv 2310.10505).

  rewards, mask: `[B, T]`. task_ids, run_ids: `[B]`. greedy_mask: `[B]` True on the
  rows of greedy rollouts, which share their task's id and are left out of the loss.
  """
  returns = returns_to_go(rewards, mask, gamma)
  greedy = jnp.asarray(greedy_mask, bool) & (task_ids >= 0)
  scores = groups.run_returns(rewards, jnp.where(greedy, run_ids, -1))
  tasks = groups.run_tasks(jnp.where(greedy, task_ids, -1), run_ids)
  count = groups.total(1.0 * (tasks >= 0), tasks)
  baseline = groups.total(scores, tasks) / jnp.maximum(count, 1)
  learn = jnp.asarray(mask, bool) & ~greedy[:, None]
  advantages = returns - groups.spread(baseline, task_ids)[:, None]
  keep = jnp.broadcast_to(~greedy[:, None], learn.shape)
  return Advantages(jnp.where(learn, advantages, 0), returns, keep)


def agentic_reinforce(rewards: Array, mask: Array, *, gamma: float = 1.0) -> Advantages:
  """A = Σ_{j≥k} γ^{j−k} r_j for the tokens of turn k (ROLL, arXiv 2506.06122).

  r_j is the reward of the j-th turn, an unbroken stretch of action tokens; all of a
  turn's tokens share its value. rewards, mask: `[B, T]`.
  """
  mask = jnp.asarray(mask, bool)
  last = mask & ~jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))
  first = mask & ~jnp.pad(mask[:, :-1], ((0, 0), (1, 0)))

  def back(carry, column):
    reward, action, ends = column
    total = jnp.where(ends, gamma, 1) * carry[0] + reward
    total = jnp.where(action, total, carry[0])
    return (total,), total

  returns = _scan_back(back, 1, rewards, mask, last)
  advantages = turns.turn_sum(jnp.where(first, returns, 0), mask)
  return Advantages(advantages, advantages)
