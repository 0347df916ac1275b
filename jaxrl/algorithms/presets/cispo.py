"""CISPO: clips the importance weight and keeps every gradient (arXiv 2506.13585)."""

from functools import partial

from jaxrl.functional import advantages, kl, losses
from jaxrl.types import Algorithm


def cispo(
  *,
  clip_low: float = 1.0,
  clip_high: float = 0.28,
  mask_clipped: bool = False,
  kl_coef: float = 1e-3,
  group_size: int = 8,
) -> Algorithm:
  """Composes group-relative advantages, clipped importance weights and a k2 term.

  The paper has no lower bound on the weight, as here, and no KL term, which `kl_coef=0`
  leaves out. The upper bound is our own.

  Args:
    clip_low: The ratio is clipped below at 1 − clip_low.
    clip_high: The ratio is clipped above at 1 + clip_high.
    mask_clipped: Whether clipped tokens are left out.
    kl_coef: The coefficient of the KL term; 0 needs no reference model.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=advantages.grpo,
    policy_loss=partial(
      losses.cispo, clip_low=clip_low, clip_high=clip_high, mask_clipped=mask_clipped
    ),
    kl_loss=kl.term(kl.k2, kl_coef),
    group_size=group_size,
    provenance='ours',
  )
