"""Role-relative advantages compare agents with those that play the same role.

A row's role is `extras['role']` of its trajectory, a number below `MAX_ROLES`. An
environment gives it in the `info` of `reset`, or an env manager to each of its rows.
"""

import jax.numpy as jnp

from jaxrl.functional import reductions
from jaxrl.functional.components import component
from jaxrl.types import MAX_ROLES, Advantages, Array


def init_baselines() -> dict[str, Array]:
  """Returns the baselines of all roles before any reward was seen: zeros."""
  return {'baseline': jnp.zeros(MAX_ROLES)}


@component(init_state=init_baselines)
def rae(
  rewards: Array,
  mask: Array,
  group_ids: Array,
  episode_ids: Array,
  state: dict[str, Array],
  role_ids: Array | None = None,
  *,
  decay: float = 0.95,
) -> Advantages:
  """Computes A = R − b[role], role-conditioned estimation (SPIRAL, arXiv 2506.24119).

  b is a running mean of the role's returns, so that the side that starts a game with an
  edge is not credited with it. In a game whose returns add up to 0, a group's mean is
  near 0 whatever its players do. All episodes of a batch meet the baseline from before
  it; then it moves by the batch's mean, n times at once: b ← d^n·b + (1−d^n)·mean. The
  paper and prime-rl move it episode by episode, so that A depends on their order:
  prime-rl after A, which for one episode of a role in each batch is this; the paper
  before A, which then is d·(R − b).

  Args:
    rewards: `[B, T]` float, the reward at each token.
    mask: `[B, T]` bool, True at action tokens.
    group_ids: `[B]` int32, the group (task) of each row; −1 at padding rows.
    episode_ids: `[B]` int32, the episode of each row; −1 at padding rows.
    state: {'baseline': `[MAX_ROLES]`}.
    role_ids: `[B]` int32, the role of each row; None for one role.
    decay: d.

  Returns:
    Advantages `[B, T]` and the next state. Metric 'baseline', the mean over episodes.
  """
  returns = reductions.episode_returns(rewards, episode_ids)
  is_run = reductions.group_of_episode(group_ids, episode_ids) >= 0
  roles = jnp.zeros_like(episode_ids)
  if role_ids is not None:
    roles = jnp.maximum(reductions.segment_max(role_ids, episode_ids), 0)
  roles = jnp.minimum(roles, MAX_ROLES - 1)
  plays = is_run[:, None] & (roles[:, None] == jnp.arange(MAX_ROLES))
  count = jnp.sum(plays, axis=0)
  total = jnp.sum(jnp.where(plays, returns[:, None], 0), axis=0)
  kept = decay ** count.astype(jnp.float32)
  old = state['baseline']
  new = kept * old + (1 - kept) * total / jnp.maximum(count, 1)
  baseline = old[roles]
  advantage = jnp.where(is_run, returns - baseline, 0)
  return Advantages(
    reductions.episode_to_tokens(advantage, episode_ids, mask),
    metrics={'baseline': reductions.masked_mean(baseline, is_run)},
    state={'baseline': new},
  )


@component(group_relative=True, whole_episodes=True)
def hierarchical_grpo(
  rewards: Array,
  mask: Array,
  group_ids: Array,
  episode_ids: Array,
  role_ids: Array,
  *,
  episode_role: int = 1,
) -> Advantages:
  """Computes A = R − mean over a row's peers, which its role decides (prime-rl, 2026).

  One agent proposes a problem and others solve it. Every row is one agent's. Rows with
  the role `episode_role`, the solvers, are compared within their episode, where they
  attempt the same proposed problem; the others with their role in the whole group, so
  that a solver is not blamed for a hard problem. It is prime-rl's `hierarchical_grpo`,
  which gives a row without peers A = 0; here it has A = R, as in all advantages of this
  package.

  Args:
    rewards: `[B, T]` float, the reward at each token.
    mask: `[B, T]` bool, True at action tokens.
    group_ids: `[B]` int32, the group (task) of each row; −1 at padding rows.
    episode_ids: `[B]` int32, the episode of each row; −1 at padding rows.
    role_ids: `[B]` int32, the role of each row.
    episode_role: The role whose rows are compared within an episode.

  Returns:
    Advantages `[B, T]`.
  """
  # Groups and episodes are both numbered below B.
  within = role_ids == episode_role
  scope = jnp.where(within, episode_ids + len(group_ids), group_ids)
  scope = jnp.where((group_ids < 0) | (episode_ids < 0), -1, scope)
  peers = reductions.unique_pair_ids(scope, jnp.maximum(role_ids, 0))
  total = jnp.where(peers < 0, 0, jnp.sum(rewards, axis=-1))
  stats = reductions.group_stats(total, peers)
  advantage = total - jnp.where(stats.count == 1, 0, stats.mean)
  return Advantages(
    jnp.where(jnp.asarray(mask, bool), advantage[:, None], 0).astype(jnp.float32)
  )
