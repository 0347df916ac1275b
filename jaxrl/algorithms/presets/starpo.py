"""StarPO: GRPO over whole multi-turn rows (arXiv 2504.20073)."""

from functools import partial

from jaxrl.functional import advantages, kl, losses
from jaxrl.types import Algorithm


def starpo(
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  kl_coef: float = 1e-3,
  group_size: int = 8,
) -> Algorithm:
  """Composes group-relative advantages of whole conversations and a k3 term.

  The paper defines the rows; clip range, KL term and group size are our own.

  Args:
    clip_low: The ratio is clipped below at 1 − clip_low.
    clip_high: The ratio is clipped above at 1 + clip_high.
    kl_coef: The coefficient of the KL term; 0 needs no reference model.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=advantages.grpo,
    policy_loss=partial(losses.ppo_clip, clip_low=clip_low, clip_high=clip_high),
    kl_loss=kl.term(kl.k3, kl_coef),
    group_size=group_size,
    provenance='ours',
  )
