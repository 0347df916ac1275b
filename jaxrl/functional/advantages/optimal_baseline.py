"""The optimal token baseline: every token's own, by the variance of its gradient."""

import jax
import jax.numpy as jnp

from jaxrl.functional.advantages.token_level import returns_to_go
from jaxrl.functional.components import component
from jaxrl.types import Advantages, Array


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
