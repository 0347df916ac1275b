"""DAPO: a higher upper clip and a mean over tokens (arXiv 2503.14476)."""

from functools import partial

from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def dapo(
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.28,
  group_size: int = 16,
) -> Algorithm:
  """Group-relative advantages and clip .2/.28; samplers filter groups and lengths."""
  return Algorithm(
    advantage=advantages.grpo,
    policy_loss=partial(losses.ppo_clip, clip_low=clip_low, clip_high=clip_high),
    group_size=group_size,
  )
