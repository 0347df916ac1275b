"""REINFORCE for conversations: the discount counts turns (arXiv 2506.06122)."""

from functools import partial

from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def agentic_reinforce(
  *,
  gamma: float = 1.0,
  group_size: int = 8,
) -> Algorithm:
  """Composes returns that are discounted once per turn and a plain policy gradient.

  The paper describes the system that this is from, ROLL. The values are our own.

  Args:
    gamma: The discount.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=partial(advantages.agentic_reinforce, gamma=gamma),
    policy_loss=losses.vanilla,
    group_size=group_size,
    provenance='ours',
  )
