"""TOPR: truncated importance weights on negative samples (arXiv 2503.14286)."""

from functools import partial
from typing import Literal

from jaxrl.functional import advantages, kl, losses
from jaxrl.types import Algorithm


def topr(
  *,
  ratio: Literal['sequence', 'token'] = 'sequence',
  kl_coef: float = 1e-3,
  group_size: int = 8,
) -> Algorithm:
  """Composes A = R, weight 1 for gains and min(r, 1) for losses, and a k2 term.

  The paper does without a KL term: see `topr_paper`.

  Args:
    ratio: What the ratio is of.
    kl_coef: The coefficient of the KL term; 0 needs no reference model.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=advantages.reinforce,
    policy_loss=partial(losses.topr, ratio=ratio),
    kl_loss=kl.term(kl.k2, kl_coef),
    group_size=group_size,
    provenance='ours',
  )
