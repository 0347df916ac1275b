"""Token-level advantages differ from token to token within a row.

Distillation advantages score the student's own samples: `teacher_logprobs` are the
teacher's log-probs of the tokens that the student generated. With several teachers,
each row has the log-probs of the teacher that its tag is routed to.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl.functional import reductions
from jaxrl.functional.advantages.group_relative import grpo
from jaxrl.functional.components import component
from jaxrl.functional.reductions import MAX_EXPONENT, clipped_exp
from jaxrl.types import Advantages, Array


@component()
def gae(
  rewards: Array,
  old_values: Array,
  mask: Array,
  *,
  gamma: float = 1.0,
  lam: float = 1.0,
  whiten: bool = False,
) -> Advantages:
  """Computes advantage estimates over action tokens (GAE, arXiv 1506.02438).

  δ_t = r_t + γV_{t+1} − V_t and A_t = δ_t + γλA_{t+1}, where t+1 is the next *action*
  token of the row: observations and padding are skipped. After the last one V = 0.

  Args:
    rewards: `[B, T]` float, the reward at each token.
    old_values: `[B, T]` the critic's value of the state before each token.
    mask: `[B, T]` bool, True at action tokens.
    gamma: The discount γ.
    lam: The decay λ.
    whiten: Whether to subtract the mean of A over action tokens and divide by its
      standard deviation.

  Returns:
    Advantages `[B, T]`. `returns` is A + V, before any whitening.
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
    advantages = reductions.whiten(advantages, mask)
  return Advantages(advantages, returns)


def _scan_back(step, carries: int, *columns: Array) -> Array:
  """Runs `step` from the last token of `[B, T]` columns to the first."""
  zero = jnp.zeros(columns[0].shape[0], jnp.float32)
  columns = tuple(column.T for column in columns)
  start = (zero,) * carries
  return jax.lax.scan(step, start, columns, reverse=True, unroll=8)[1].T


def returns_to_go(rewards: Array, mask: Array, gamma: Array | float) -> Array:
  """Computes Σ_{k≥t} γ^{k−t} r_k over the action tokens of a row.

  Args:
    rewards: `[B, T]` float, the reward at each token.
    mask: `[B, T]` bool, True at action tokens.
    gamma: The discount γ.

  Returns:
    `[B, T]`; 0 where the mask is not set.
  """

  def back(carry, column):
    reward, action = column
    total = jnp.where(action, reward + gamma * carry[0], carry[0])
    return (total,), jnp.where(action, total, 0)

  return _scan_back(back, 1, rewards, jnp.asarray(mask, bool))


@component()
def reinforce(
  rewards: Array,
  mask: Array,
  episode_ids: Array,
  *,
  gamma: float | None = None,
) -> Advantages:
  """Computes A = R, the episode's total reward, at every token (Williams, 1992).

  Args:
    rewards: `[B, T]` float, the reward at each token.
    mask: `[B, T]` bool, True at action tokens.
    episode_ids: `[B]` int32, the episode of each row; −1 at padding rows.
    gamma: For rewards per token: the discount of the return-to-go Σ_{k≥t} γ^{k−t} r_k
      over the action tokens of the row, used instead of R; None for R.

  Returns:
    Advantages `[B, T]`. `returns` is the same.
  """
  if gamma is not None:
    advantages = returns_to_go(rewards, mask, gamma)
  else:
    returns = reductions.episode_returns(rewards, episode_ids)
    advantages = reductions.episode_to_tokens(returns, episode_ids, mask)
  return Advantages(advantages, advantages)


@component(group_relative=lambda options: options['baseline'] == 'group')
def reinforce_plus_plus(
  rewards: Array,
  mask: Array,
  group_ids: Array,
  episode_ids: Array,
  *,
  gamma: float = 1.0,
  baseline: Literal['none', 'group'] = 'none',
  max_sigma: float | None = None,
) -> Advantages:
  """Computes A = whiten(Σ_k γ^k r_{t+k}) over the batch (arXiv 2501.03262).

  With baseline='group', a group of one has the baseline 0, so that its return is
  whitened as it is.

  Args:
    rewards: `[B, T]` float, the reward at each token.
    mask: `[B, T]` bool, True at action tokens.
    group_ids: `[B]` int32, the group (task) of each row; −1 at padding rows.
    episode_ids: `[B]` int32, the episode of each row; −1 at padding rows.
    gamma: The discount γ.
    baseline: 'group' first subtracts the mean total reward of the group; 'none' does
      not.
    max_sigma: Tokens with |A| > max_sigma have A = 0 instead, and count in means over
      tokens all the same; 3 in R1-Reward (arXiv 2505.02835). None changes none.

  Returns:
    Advantages `[B, T]`. `returns` is the return-to-go.
  """
  returns = returns_to_go(rewards, mask, gamma)
  advantages = returns
  if baseline == 'group':
    scores = reductions.episode_returns(rewards, episode_ids)
    stats = reductions.group_stats(
      scores, reductions.group_of_episode(group_ids, episode_ids)
    )
    mean = jnp.where(stats.count == 1, 0, stats.mean)
    advantages = returns - reductions.episode_to_tokens(mean, episode_ids, mask)
  elif baseline != 'none':
    raise ValueError(f"baseline is {baseline!r}; it must be 'none' or 'group'")
  whitened = reductions.whiten(advantages, jnp.asarray(mask, bool))
  if max_sigma is not None:
    whitened = jnp.where(jnp.abs(whitened) <= max_sigma, whitened, 0)
  return Advantages(whitened, returns)


@component()
def remax(
  rewards: Array,
  mask: Array,
  group_ids: Array,
  episode_ids: Array,
  greedy_mask: Array,
  *,
  gamma: float = 1.0,
) -> Advantages:
  """Computes A_t = Σ_k γ^k r_{t+k} − R of the greedy rollout (ReMax, arXiv 2310.10505).

  The samples of a group are not compared with each other: one sample beside the greedy
  rollout is enough. Without a greedy rollout, the baseline is 0.

  Args:
    rewards: `[B, T]` float, the reward at each token.
    mask: `[B, T]` bool, True at action tokens.
    group_ids: `[B]` int32, the group (task) of each row; −1 at padding rows.
    episode_ids: `[B]` int32, the episode of each row; −1 at padding rows.
    greedy_mask: `[B]` True on the rows of greedy rollouts, which share their group's id
      and are left out of the loss.
    gamma: The discount γ.

  Returns:
    Advantages `[B, T]`. `keep` is False on greedy rows.
  """
  returns = returns_to_go(rewards, mask, gamma)
  greedy = jnp.asarray(greedy_mask, bool) & (group_ids >= 0)
  scores = reductions.episode_returns(rewards, jnp.where(greedy, episode_ids, -1))
  tasks = reductions.group_of_episode(jnp.where(greedy, group_ids, -1), episode_ids)
  count = reductions.segment_sum(1.0 * (tasks >= 0), tasks)
  baseline = reductions.segment_sum(scores, tasks) / jnp.maximum(count, 1)
  learn = jnp.asarray(mask, bool) & ~greedy[:, None]
  advantages = returns - reductions.gather(baseline, group_ids)[:, None]
  keep = jnp.broadcast_to(~greedy[:, None], learn.shape)
  return Advantages(jnp.where(learn, advantages, 0), returns, keep)


@component(turn_level=True)
def agentic_reinforce(rewards: Array, mask: Array, *, gamma: float = 1.0) -> Advantages:
  """Computes A = Σ_{j≥k} γ^{j−k} r_j for the tokens of turn k (ROLL, arXiv 2506.06122).

  r_j is the reward of the j-th turn, an unbroken stretch of action tokens; all tokens
  of a turn share its value.

  Args:
    rewards: `[B, T]` float, the reward at each token.
    mask: `[B, T]` bool, True at action tokens.
    gamma: The discount γ, applied once per turn.

  Returns:
    Advantages `[B, T]`. `returns` is the same.
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
  advantages = reductions.turn_sum(jnp.where(first, returns, 0), mask)
  return Advantages(advantages, advantages)


@component()
def on_policy_distill(
  teacher_logprobs: Array, old_logprobs: Array, mask: Array, *, coef: float = 1.0
) -> Advantages:
  """Computes A_t = c·(log π_teacher − log π_student) (arXiv 2306.08543).

  Args:
    teacher_logprobs: `[B, T]` the teacher's log-probs of the tokens.
    old_logprobs: `[B, T]` log-probs by the student that sampled.
    mask: `[B, T]` bool, True at action tokens.
    coef: The factor c.

  Returns:
    Advantages `[B, T]`.
  """
  gap = coef * (teacher_logprobs - old_logprobs)
  return Advantages(jnp.where(mask, gap, 0).astype(jnp.float32))


@component(group_relative=True)
def grpo_distill(
  rewards: Array,
  mask: Array,
  group_ids: Array,
  episode_ids: Array,
  teacher_logprobs: Array,
  old_logprobs: Array,
  *,
  coef: float = 1.0,
  scale_by_std: bool = True,
  std_over: Literal['group', 'batch'] = 'group',
) -> Advantages:
  """Computes A_grpo − c·(log π_student − log π_teacher) (arXiv 2402.03300, 2306.08543).

  A_grpo is that of `grpo`, so it is R in a group of one.

  Args:
    rewards: `[B, T]` float, the reward at each token.
    mask: `[B, T]` bool, True at action tokens.
    group_ids: `[B]` int32, the group (task) of each row; −1 at padding rows.
    episode_ids: `[B]` int32, the episode of each row; −1 at padding rows.
    teacher_logprobs: `[B, T]` the teacher's log-probs of the tokens.
    old_logprobs: `[B, T]` log-probs by the student that sampled.
    coef: The factor c.
    scale_by_std: Whether to divide by s; False is Dr. GRPO (arXiv 2503.20783).
    std_over: 'batch' divides by s over all episodes of the batch (Lite PPO).

  Returns:
    Advantages `[B, T]`.
  """
  group = grpo(
    rewards, mask, group_ids, episode_ids, scale_by_std=scale_by_std, std_over=std_over
  )
  pull = on_policy_distill(teacher_logprobs, old_logprobs, mask, coef=coef)
  return Advantages(group.advantages + pull.advantages, metrics=group.metrics)


@component()
def jsd(
  teacher_logprobs: Array,
  old_logprobs: Array,
  mask: Array,
  *,
  beta: float = 0.5,
  coef: float = 1.0,
) -> Advantages:
  """Computes A_t = c·log(1−β + βe^d)/β, d = teacher − student (arXiv 2306.13649).

  It is the score-function gradient of GKD's divergence JSD(β)/(β(1−β)), whose mixture
  is β·teacher + (1−β)·student. β = 1 gives d, the reverse KL; β → 0 gives e^d − 1, the
  forward KL.

  Args:
    teacher_logprobs: `[B, T]` the teacher's log-probs of the tokens.
    old_logprobs: `[B, T]` log-probs by the student that sampled.
    mask: `[B, T]` bool, True at action tokens.
    beta: The teacher's share β of the mixture, in [0, 1].
    coef: The factor c.

  Returns:
    Advantages `[B, T]`.
  """
  d = jnp.where(mask, teacher_logprobs - old_logprobs, 0)
  d = jnp.clip(d, -MAX_EXPONENT, MAX_EXPONENT)
  share = jnp.asarray(beta, jnp.float32)
  rise = share * jnp.expm1(d)
  # log1p keeps the digits when the sum is near 1; when it is near 0, expm1 lost them.
  small = rise > -0.5
  far = jnp.log(jnp.where(small, 1, 1 - share + share * clipped_exp(d)))
  total = jnp.where(small, jnp.log1p(jnp.where(small, rise, 0)), far)
  divided = total / jnp.where(share == 0, 1, share)
  value = coef * jnp.where(share == 0, jnp.expm1(d), divided)
  return Advantages(jnp.where(mask, value, 0))


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
