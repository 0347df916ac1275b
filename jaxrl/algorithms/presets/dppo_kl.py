"""DPPO by divergence: a trust region on a binary KL (arXiv 2602.04879)."""

from functools import partial

from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def dppo_kl(
  *,
  clip_low: float = 0.05,
  clip_high: float = 0.05,
  cap: float = 20.0,
  group_size: int = 8,
) -> Algorithm:
  """Composes group-relative advantages and a mask of tokens that moved too far.

  The thresholds are our own, not the paper's: verl starts with PPO's 0.2, a divergence
  that a token hardly ever reaches.

  Args:
    clip_low: How far a token with A < 0 may diverge downwards.
    clip_high: How far a token with A > 0 may diverge upwards.
    cap: The cap of the ratio.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=advantages.grpo,
    policy_loss=partial(
      losses.dppo_kl, clip_low=clip_low, clip_high=clip_high, cap=cap
    ),
    group_size=group_size,
    provenance='ours',
  )
