"""RAE: each role has a running baseline of its own (SPIRAL, arXiv 2506.24119)."""

from functools import partial

from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def rae(
  *,
  decay: float = 0.95,
  group_size: int = 8,
) -> Algorithm:
  """Composes returns relative to those of a role and the plain policy gradient.

  The decay is the paper's and prime-rl's. The baseline moves once a batch, not once an
  episode, and the group size is our own.

  Args:
    decay: How much of a baseline stays with each of its role's episodes.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=partial(advantages.rae, decay=decay),
    policy_loss=losses.vanilla,
    group_size=group_size,
    provenance='ours',
  )
