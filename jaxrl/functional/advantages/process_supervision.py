"""Advantages from rewards for the steps of a reply, not for the reply as a whole."""

import jax.numpy as jnp

from jaxrl.functional import reductions
from jaxrl.functional.advantages.token_level import returns_to_go
from jaxrl.functional.components import component
from jaxrl.types import Advantages, Array


@component(group_relative=True)
def process_grpo(
  rewards: Array,
  step_ends: Array,
  mask: Array,
  group_ids: Array,
  *,
  scale_by_std: bool = True,
) -> Advantages:
  """Computes A_t = Σ_{k: step k ends at or after t} (r_k − μ)/(s + 1e-6).

  μ and s are the mean and sample standard deviation of the rewards of all steps of the
  group: GRPO with process supervision (DeepSeekMath, arXiv 2402.03300, section 4.1.3).
  A row counts its own steps alone, so an episode should be one row. If every sample has
  one step, this is GRPO. A group's only step has r itself in the place of the quotient,
  and a group of equal rewards learns nothing.

  Args:
    rewards: `[B, T]` float, the reward at each token; those between steps do not count.
    step_ends: `[B, T]` bool, True at the last token of each step.
    mask: `[B, T]` bool, True at action tokens.
    group_ids: `[B]` int32, the group (task) of each row; −1 at padding rows.
    scale_by_std: Whether to divide by s.

  Returns:
    Advantages `[B, T]`.
  """
  mask = jnp.asarray(mask, bool)
  ends = jnp.asarray(step_ends, bool) & mask & (group_ids >= 0)[:, None]

  def over_group(x: Array) -> Array:
    sums = reductions.segment_sum(reductions.row_sum(x, ends), group_ids)
    return reductions.gather(sums, group_ids)[:, None]

  def largest(x: Array) -> Array:
    top = jnp.max(jnp.where(ends, x, -jnp.inf), axis=1)
    return reductions.gather(reductions.segment_max(top, group_ids), group_ids)[:, None]

  count = over_group(jnp.ones_like(rewards))
  top, bottom = largest(rewards), -largest(-rewards)
  # A mean would make equal rewards unequal, by rounding.
  mean = jnp.where(top == bottom, top, over_group(rewards) / jnp.maximum(count, 1))
  alone = count == 1
  centred = jnp.where(ends, rewards - jnp.where(alone, 0, mean), 0)
  if scale_by_std:
    std = reductions.safe_sqrt(over_group(centred**2) / jnp.maximum(count - 1, 1))
    centred = centred / (jnp.where(alone, 1, std) + reductions.EPSILON)
  return Advantages(returns_to_go(centred, mask, 1.0))
