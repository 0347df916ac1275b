"""Advantages that differ from token to token."""

import jax
import jax.numpy as jnp

from jaxrl.functional import groups
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
  """Generalised advantage estimation over action tokens (arXiv 1506.02438).

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

  zero = jnp.zeros(mask.shape[0], jnp.float32)
  columns = (rewards.T, old_values.T, mask.T)
  _, advantages = jax.lax.scan(back, (zero, zero), columns, reverse=True, unroll=8)
  advantages = advantages.T
  returns = jnp.where(mask, advantages + old_values, 0)
  if whiten:
    centred = advantages - groups.masked_mean(advantages, mask)
    advantages = centred / (groups.masked_std(advantages, mask) + 1e-6)
  return Advantages(jnp.where(mask, advantages, 0), returns)
