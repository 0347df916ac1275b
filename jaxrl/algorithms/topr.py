"""TOPR: failures tapered by how likely they still are (arXiv 2503.14286)."""

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
  """The reward as advantage; weight 1 for gains, min(r, 1) for losses; k2."""
  return Algorithm(
    advantage=advantages.reinforce,
    policy_loss=partial(losses.topr, ratio=ratio),
    kl_loss=kl.term(kl.k2, kl_coef),
    group_size=group_size,
  )
