"""REC: group-relative REINFORCE seen off-policy (arXiv 2509.24203)."""

from functools import partial
from typing import Literal

from jaxrl.functional import advantages, kl, losses
from jaxrl.types import Algorithm


def rec(
  *,
  keep: Literal['none', 'two_side', 'one_side', 'gspo_one_side', 'ring'] = 'one_side',
  weight: Literal['none', 'importance', 'gspo', 'advantage'] = 'importance',
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  scale_by_std: bool = False,
  kl_coef: float = 1e-3,
  group_size: int = 8,
) -> Algorithm:
  """Composes A = R − μ, tokens kept and weighted by their ratio, and a k2 term.

  The paper defines the variants that `keep` and `weight` choose from. The KL term and
  its coefficient are Trinity-RFT's.

  Args:
    keep: Which tokens are kept.
    weight: The weight of a token.
    clip_low: The ratio is clipped below at 1 − clip_low.
    clip_high: The ratio is clipped above at 1 + clip_high.
    scale_by_std: Whether to divide advantages by the standard deviation of the group.
    kl_coef: The coefficient of the KL term; 0 needs no reference model.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=partial(advantages.rec, scale_by_std=scale_by_std),
    policy_loss=partial(
      losses.rec, keep=keep, weight=weight, clip_low=clip_low, clip_high=clip_high
    ),
    kl_loss=kl.term(kl.k2, kl_coef),
    group_size=group_size,
    provenance='trinity',
  )
