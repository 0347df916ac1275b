"""On-policy distillation: a teacher judges the student's tokens (arXiv 2306.08543)."""

from functools import partial

from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def on_policy_distill(
  *,
  coef: float = 1.0,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  group_size: int = 8,
) -> Algorithm:
  """Builds the policy gradient of the reverse KL to the teacher, without rewards.

  The paper adds mixed sampling from the teacher and a normalisation by length, which
  are left out here. The clip range is our own.

  Args:
    coef: The factor on the advantage.
    clip_low: The ratio is clipped below at 1 − clip_low.
    clip_high: The ratio is clipped above at 1 + clip_high.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=partial(advantages.on_policy_distill, coef=coef),
    policy_loss=partial(losses.ppo_clip, clip_low=clip_low, clip_high=clip_high),
    group_size=group_size,
    provenance='ours',
  )
