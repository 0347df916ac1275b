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
  """Keeps each task's best runs above `threshold`, under the clipped surrogate."""
  return Algorithm(
    advantage=partial(advantages.best, threshold=threshold),
    policy_loss=partial(losses.ppo_clip, clip_low=clip_low, clip_high=clip_high),
    group_size=group_size,
  )
