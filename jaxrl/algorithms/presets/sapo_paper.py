"""SAPO without a KL term, as in its paper (arXiv 2511.20347)."""

import dataclasses

from jaxrl.algorithms.presets.sapo import sapo
from jaxrl.types import Algorithm


def sapo_paper(
  *, tau_positive: float = 1.0, tau_negative: float = 1.05, group_size: int = 8
) -> Algorithm:
  """Composes group-relative advantages and soft gates.

  The temperatures are the paper's. The number of samples is our own.

  Args:
    tau_positive: τ where the advantage is positive.
    tau_negative: τ elsewhere.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  algorithm = sapo(
    tau_positive=tau_positive,
    tau_negative=tau_negative,
    kl_coef=0.0,
    group_size=group_size,
  )
  return dataclasses.replace(algorithm, provenance='paper')
