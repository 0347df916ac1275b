"""Asymmetric REINFORCE: a baseline shifted below the mean (arXiv 2506.20520)."""

from functools import partial

from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def asymre(
  *,
  shift: float = -0.1,
  tau: float = 1.0,
  group_size: int = 8,
) -> Algorithm:
  """Composes A = R − (μ + shift) and the tempered policy gradient of OPMD.

  The factor 1/(1+τ) of the loss is Trinity-RFT's; the paper has none.

  Args:
    shift: What is added to the baseline.
    tau: The temperature τ.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=partial(advantages.asymre, shift=shift),
    policy_loss=partial(losses.opmd, tau=tau),
    group_size=group_size,
    provenance='trinity',
  )
