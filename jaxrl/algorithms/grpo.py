"""GRPO: attempts at one task compete with each other (arXiv 2402.03300)."""

from functools import partial

from jaxrl.functional import advantages, kl, losses
from jaxrl.types import Algorithm


def grpo(
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  scale_by_std: bool = True,
  std_threshold: float | None = None,
  kl_coef: float = 1e-3,
  group_size: int = 8,
) -> Algorithm:
  """Group-relative advantages, the clipped surrogate, and a k2 pull to a reference."""
  return Algorithm(
    advantage=partial(
      advantages.grpo, scale_by_std=scale_by_std, std_threshold=std_threshold
    ),
    policy_loss=partial(losses.ppo_clip, clip_low=clip_low, clip_high=clip_high),
    kl_loss=kl.term(kl.k2, kl_coef),
    group_size=group_size,
  )
