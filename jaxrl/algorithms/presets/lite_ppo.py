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
  """Composes GRPO scaled by the batch's standard deviation and PPO's clip.

  The normalisation and the mean over tokens are the paper's, clip range and group size
  our own.

  Args:
    clip_low: The ratio is clipped below at 1 − clip_low.
    clip_high: The ratio is clipped above at 1 + clip_high.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=partial(advantages.grpo, std_over='batch'),
    policy_loss=partial(losses.ppo_clip, clip_low=clip_low, clip_high=clip_high),
    group_size=group_size,
    provenance='ours',
  )
