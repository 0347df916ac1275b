"""RAFT: fine-tuning on the best answers found (arXiv 2304.06767)."""

from functools import partial

from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def raft(
  *,
  threshold: float = 0.0,
  group_size: int = 8,
) -> Algorithm:
  """Keeps each task's best runs above `threshold` and maximises their likelihood."""
  return Algorithm(
    advantage=partial(advantages.best, threshold=threshold),
    policy_loss=losses.sft,
    group_size=group_size,
  )
