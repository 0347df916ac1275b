"""DRO: a policy gradient with a quadratic pull to the old policy (arXiv 2405.19107)."""

from functools import partial

from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def dro(
  *,
  beta: float = 0.05,
  group_size: int = 8,
) -> Algorithm:
  """Composes group-relative advantages and the token form of verl and of Tinker.

  The paper learns a value in the place of the group mean; verl and Tinker leave β to
  the user, so its value is our own.

  Args:
    beta: The strength of the pull.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=advantages.grpo,
    policy_loss=partial(losses.dro, beta=beta),
    group_size=group_size,
    provenance='ours',
  )
