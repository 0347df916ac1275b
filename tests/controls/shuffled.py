"""A control: GRPO on rewards that belong to another attempt at the same task.

Attempts at a task are drawn alike, so handing each one its neighbour's reward keeps the
distribution of advantages and breaks their tie to what was done. A policy that still
gains by it gains by something else than its rewards.
"""

import jax.numpy as jnp

from jaxrl.functional import advantages
from jaxrl.types import Advantages, Array


def grpo_of_the_neighbour(
  rewards: Array, mask: Array, group_ids: Array, episode_ids: Array
) -> Advantages:
  """`advantages.grpo` after rewards moved on by one attempt within each group.

  rewards, mask: `[B, T]`. group_ids, episode_ids: `[B]`, −1 at padding rows; the rows
  of a group lie side by side, one for each sample.
  """
  totals = jnp.sum(jnp.where(mask, rewards, 0), axis=1)
  same = jnp.roll(group_ids, -1) == group_ids
  first = jnp.argmax(group_ids[:, None] == jnp.arange(group_ids.shape[0])[None], axis=0)
  neighbour = jnp.where(same, jnp.roll(totals, -1), totals[first[group_ids]])
  placed = jnp.zeros_like(rewards).at[:, -1].set(neighbour)
  return advantages.grpo(placed, jnp.ones_like(mask), group_ids, episode_ids)
