"""DPPO by total variation: a trust region on probabilities (arXiv 2602.04879)."""

from functools import partial

from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def dppo_tv(
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  cap: float = 20.0,
  group_size: int = 8,
) -> Algorithm:
  """Composes group-relative advantages and a mask of tokens that moved too far.

  The thresholds are those that verl and SkyRL start with, not ones that the paper
  tunes.

  Args:
    clip_low: How far the probability of a token with A < 0 may fall.
    clip_high: How far the probability of a token with A > 0 may rise.
    cap: The cap of the ratio.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=advantages.grpo,
    policy_loss=partial(
      losses.dppo_tv, clip_low=clip_low, clip_high=clip_high, cap=cap
    ),
    group_size=group_size,
    provenance='verl',
  )
