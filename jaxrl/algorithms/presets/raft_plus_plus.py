"""RAFT++: RAFT with ratios and clipping (arXiv 2504.11343)."""

from functools import partial

from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def raft_plus_plus(
  *,
  threshold: float = 0.0,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  group_size: int = 8,
) -> Algorithm:
  """Composes each task's best samples above `threshold` and PPO's clip.

  The combination is the paper's; the clip range, the threshold and the group size are
  our own.

  Args:
    threshold: Episodes with at most this reward are left out.
    clip_low: The ratio is clipped below at 1 − clip_low.
    clip_high: The ratio is clipped above at 1 + clip_high.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=partial(advantages.best_of_group, threshold=threshold),
    policy_loss=partial(losses.ppo_clip, clip_low=clip_low, clip_high=clip_high),
    group_size=group_size,
    provenance='ours',
  )
