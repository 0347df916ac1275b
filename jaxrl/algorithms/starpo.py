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
  """Group-relative advantages of whole conversations, and k3 to a reference."""
  return Algorithm(
    advantage=advantages.grpo,
    policy_loss=partial(losses.ppo_clip, clip_low=clip_low, clip_high=clip_high),
    kl_loss=kl.term(kl.k3, kl_coef),
    group_size=group_size,
  )
