"""RLOO: each attempt against the mean of the others (arXiv 2402.14740)."""

from jaxrl.functional import advantages, kl, losses
from jaxrl.types import Algorithm


def rloo(
  *,
  kl_coef: float = 1e-3,
  group_size: int = 8,
) -> Algorithm:
  """Composes leave-one-out advantages, a plain policy gradient and a k1 penalty.

  The paper samples 2 or 4 answers to a prompt. The number here and the coefficient of
  the penalty are our own.

  Args:
    kl_coef: The coefficient of the KL term; 0 needs no reference model.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=advantages.rloo,
    policy_loss=losses.vanilla,
    kl_penalty=kl.term(kl.k1, kl_coef),
    group_size=group_size,
    provenance='ours',
  )
