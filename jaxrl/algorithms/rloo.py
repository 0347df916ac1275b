"""RLOO: each attempt against the mean of the others (arXiv 2402.14740)."""

from jaxrl.functional import advantages, kl, losses
from jaxrl.types import Algorithm


def rloo(
  *,
  kl_coef: float = 1e-3,
  group_size: int = 8,
) -> Algorithm:
  """Leave-one-out advantages, a plain policy gradient, and k1 taken off the rewards."""
  return Algorithm(
    advantage=advantages.rloo,
    policy_loss=losses.vanilla,
    kl_penalty=kl.term(kl.k1, kl_coef),
    group_size=group_size,
  )
