"""Optimal token baseline: gradient norms weigh a baseline (arXiv 2602.07078)."""

from functools import partial

from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def optimal_token_baseline(
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  group_size: int = 8,
) -> Algorithm:
  """Composes every token's own baseline and PPO's clip, as verl's example does.

  The paper's groups have as few as 4 samples.

  Args:
    clip_low: The ratio is clipped below at 1 − clip_low.
    clip_high: The ratio is clipped above at 1 + clip_high.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=advantages.optimal_token_baseline,
    policy_loss=partial(losses.ppo_clip, clip_low=clip_low, clip_high=clip_high),
    group_size=group_size,
    provenance='verl',
  )
