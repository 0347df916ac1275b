"""ReMax: REINFORCE with a greedy-decoding baseline (arXiv 2310.10505)."""

from functools import partial

from jaxrl.functional import advantages, kl, losses
from jaxrl.types import Algorithm


def remax(
  *,
  gamma: float = 1.0,
  kl_coef: float = 1e-3,
  group_size: int = 1,
) -> Algorithm:
  """Composes returns-to-go minus the greedy answer's reward and a k1 penalty.

  Each group has one member more than `group_size`, played at temperature 0.

  One sample beside the greedy answer is what the paper has. The coefficient of the
  penalty is our own.

  Args:
    gamma: The discount.
    kl_coef: The coefficient of the KL term; 0 needs no reference model.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=partial(advantages.remax, gamma=gamma),
    policy_loss=losses.vanilla,
    kl_penalty=kl.term(kl.k1, kl_coef),
    group_size=group_size,
    provenance='ours',
  )
