"""REINFORCE: the reward itself as the advantage (Williams, 1992)."""

from functools import partial

from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def reinforce(
  *,
  gamma: float | None = None,
  group_size: int = 8,
) -> Algorithm:
  """Composes A = R and −A·p; `gamma` turns R into a return-to-go per token.

  The paper samples no groups: the group size is our own.

  Args:
    gamma: The discount.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=partial(advantages.reinforce, gamma=gamma),
    policy_loss=losses.vanilla,
    group_size=group_size,
    provenance='ours',
  )
