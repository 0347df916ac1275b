"""Clip-cov: some tokens of high covariance have no gradient (arXiv 2505.22617)."""

from functools import partial

from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def clip_cov(
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  ratio: float = 2e-4,
  cov_low: float = 1.0,
  cov_high: float = 5.0,
  group_size: int = 8,
) -> Algorithm:
  """Composes group-relative advantages and PPO's clip without the drawn tokens.

  The values are those of verl's config, and not all of them are the paper's.

  Args:
    clip_low: The ratio is clipped below at 1 − clip_low.
    clip_high: The ratio is clipped above at 1 + clip_high.
    ratio: The share of tokens that are left out.
    cov_low: Only tokens whose covariance is greater are drawn.
    cov_high: Only tokens whose covariance is smaller are drawn.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=advantages.grpo,
    policy_loss=partial(
      losses.clip_cov,
      clip_low=clip_low,
      clip_high=clip_high,
      ratio=ratio,
      cov_low=cov_low,
      cov_high=cov_high,
    ),
    group_size=group_size,
    provenance='verl',
  )
