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
  """Composes group-relative advantages, PPO's clip and a k2 term to a reference.

  The paper has the k3 estimator with a coefficient of 0.04, no dual clip, equal weights
  of all replies and 64 samples: see `grpo_paper`.

  Args:
    clip_low: The ratio is clipped below at 1 − clip_low.
    clip_high: The ratio is clipped above at 1 + clip_high.
    scale_by_std: Whether to divide advantages by the standard deviation of the group.
    std_threshold: Groups of one, and groups whose rewards have at most this standard
      deviation, are dropped; None drops none.
    kl_coef: The coefficient of the KL term; 0 needs no reference model.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=partial(
      advantages.grpo, scale_by_std=scale_by_std, std_threshold=std_threshold
    ),
    policy_loss=partial(losses.ppo_clip, clip_low=clip_low, clip_high=clip_high),
    kl_loss=kl.term(kl.k2, kl_coef),
    group_size=group_size,
    provenance='trinity',
  )
