"""M2PO: a trust region on the second moment of log-ratios (arXiv 2510.01161)."""

from functools import partial

from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def m2po(
  *,
  threshold: float = 0.04,
  group_size: int = 8,
) -> Algorithm:
  """Composes group-relative advantages and a loss without the most drifted tokens.

  The paper uses the same threshold in all its runs, and its scripts sample 8 answers.

  Args:
    threshold: The largest mean second moment.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=advantages.grpo,
    policy_loss=partial(losses.m2po, threshold=threshold),
    group_size=group_size,
    provenance='paper',
  )
