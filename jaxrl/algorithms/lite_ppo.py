"""Lite PPO: the group's mean, the batch's standard deviation (arXiv 2508.08221)."""

from functools import partial

from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def lite_ppo(
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  group_size: int = 8,
) -> Algorithm:
  """GRPO scaled by the standard deviation over the batch, and the clipped surrogate."""
  return Algorithm(
    advantage=partial(advantages.grpo, std_over='batch'),
    policy_loss=partial(losses.ppo_clip, clip_low=clip_low, clip_high=clip_high),
    group_size=group_size,
  )
