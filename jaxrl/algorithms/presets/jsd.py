"""On-policy distillation by a Jensen–Shannon divergence (arXiv 2306.13649)."""

from functools import partial

from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def jsd(
  *,
  beta: float = 0.5,
  coef: float = 1.0,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  group_size: int = 8,
) -> Algorithm:
  """Builds the policy gradient of GKD's divergence, on the student's samples.

  The paper differentiates the divergence over the whole vocabulary, with β of 0.1, 0.5
  and 0.9. The policy gradient and its clip range are our own.

  Args:
    beta: The teacher's share of the mixture, β of the paper: towards 0 the divergence
      becomes the forward KL, towards 1 the reverse KL.
    coef: The factor on the advantage.
    clip_low: The ratio is clipped below at 1 − clip_low.
    clip_high: The ratio is clipped above at 1 + clip_high.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=partial(advantages.jsd, beta=beta, coef=coef),
    policy_loss=partial(losses.ppo_clip, clip_low=clip_low, clip_high=clip_high),
    group_size=group_size,
    provenance='ours',
  )
