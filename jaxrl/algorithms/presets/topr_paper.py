"""TOPR without a KL term, as in its paper (arXiv 2503.14286)."""

import dataclasses
from typing import Literal

from jaxrl.algorithms.presets.topr import topr
from jaxrl.types import Algorithm


def topr_paper(
  *, ratio: Literal['sequence', 'token'] = 'sequence', group_size: int = 8
) -> Algorithm:
  """Composes A = R, and weight 1 for gains and min(r, 1) for losses.

  The number of samples is our own.

  Args:
    ratio: What the ratio is of.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  algorithm = topr(ratio=ratio, kl_coef=0.0, group_size=group_size)
  return dataclasses.replace(algorithm, provenance='paper')
