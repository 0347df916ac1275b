"""GSPO without a KL term, as in the formulas of its paper (arXiv 2507.18071)."""

import dataclasses
from typing import Literal

from jaxrl.algorithms.presets.gspo import gspo
from jaxrl.types import Algorithm


def gspo_paper(
  *,
  clip_low: float = 3e-4,
  clip_high: float = 4e-4,
  level: Literal['sequence', 'turn'] = 'sequence',
  group_size: int = 8,
) -> Algorithm:
  """Composes group-relative advantages and clipped sequence ratios.

  The clip range is the paper's. The number of samples is our own.

  Args:
    clip_low: The ratio is clipped below at 1 − clip_low.
    clip_high: The ratio is clipped above at 1 + clip_high.
    level: What the ratio is of.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  algorithm = gspo(
    clip_low=clip_low,
    clip_high=clip_high,
    level=level,
    kl_coef=0.0,
    group_size=group_size,
  )
  return dataclasses.replace(algorithm, provenance='paper')
