"""MaxRL: rare successes weigh as in a likelihood (arXiv 2602.02710)."""

from functools import partial

from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def maxrl(
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  group_size: int = 8,
) -> Algorithm:
  """Composes rewards relative to their group's mean and PPO's clip.

  The clip and the group size are our own: the paper's gradient is on-policy, and its
  truncation of the likelihood is the group size.

  Args:
    clip_low: The ratio is clipped below at 1 − clip_low.
    clip_high: The ratio is clipped above at 1 + clip_high.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=advantages.maxrl,
    policy_loss=partial(losses.ppo_clip, clip_low=clip_low, clip_high=clip_high),
    group_size=group_size,
    provenance='ours',
  )
