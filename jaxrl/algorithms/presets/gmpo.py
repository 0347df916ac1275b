"""GMPO: the geometric mean of clipped ratios (arXiv 2507.20673)."""

from functools import partial

from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def gmpo(
  *,
  clip_low: float = 0.4,
  clip_high: float = 0.4,
  group_size: int = 8,
) -> Algorithm:
  """Composes group-relative advantages and one geometric mean of ratios for a row.

  The range is what TRL says that the paper recommends; the paper's group size differs.

  Args:
    clip_low: A log-ratio is clipped below at −clip_low.
    clip_high: A log-ratio is clipped above at clip_high.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=advantages.grpo,
    policy_loss=partial(losses.gmpo, clip_low=clip_low, clip_high=clip_high),
    aggregation='sequence_mean_token_mean',
    group_size=group_size,
    provenance='trl',
  )
