"""Probability band: tokens that moved too far are masked (prime-rl, 2026)."""

from functools import partial

from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def probability_band(
  *,
  threshold: float = 0.1,
  regulariser_coef: float = 1e-3,
  group_size: int = 8,
) -> Algorithm:
  """Composes centred advantages and a symmetric mask on |π − μ|.

  prime-rl calls the loss IPO, which is the name of a preference loss here. It has no
  paper.

  Args:
    threshold: How far a probability may move.
    regulariser_coef: The coefficient of the squared log-ratio.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=partial(advantages.grpo, scale_by_std=False),
    policy_loss=partial(
      losses.probability_band,
      threshold=threshold,
      regulariser_coef=regulariser_coef,
    ),
    group_size=group_size,
    provenance='prime-rl',
  )
