"""Kimi k1.5: a policy gradient held by a squared log-ratio (arXiv 2501.12599)."""

from functools import partial
from typing import Literal

from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def kimi(
  *,
  tau: float = 1.0,
  level: Literal['token', 'sequence'] = 'token',
  group_size: int = 8,
) -> Algorithm:
  """Composes A = R − μ and −A·p + (τ/2)(p−o)², per token or per sequence.

  The paper has the squared log-ratio of whole responses, `level='sequence'`. The value
  of τ is our own.

  Args:
    tau: The temperature τ.
    level: What the ratio is of.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=advantages.opmd,
    policy_loss=partial(losses.kimi, tau=tau, level=level),
    group_size=group_size,
    provenance='ours',
  )
