"""GSPO: ratios of whole sequences (arXiv 2507.18071)."""

from functools import partial
from typing import Literal

from jaxrl.functional import advantages, kl, losses
from jaxrl.types import Algorithm


def gspo(
  *,
  clip_low: float = 3e-4,
  clip_high: float = 4e-4,
  level: Literal['sequence', 'turn'] = 'sequence',
  kl_coef: float = 1e-3,
  group_size: int = 8,
) -> Algorithm:
  """Composes group-relative advantages, clipped sequence ratios and a k2 term.

  The clip range is the paper's. Its formulas leave out a KL term: see `gspo_paper`.

  Args:
    clip_low: The ratio is clipped below at 1 − clip_low.
    clip_high: The ratio is clipped above at 1 + clip_high.
    level: What the ratio is of.
    kl_coef: The coefficient of the KL term; 0 needs no reference model.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=advantages.grpo,
    policy_loss=partial(
      losses.gspo, clip_low=clip_low, clip_high=clip_high, level=level
    ),
    kl_loss=kl.term(kl.k2, kl_coef),
    aggregation='sequence_mean_token_mean',
    group_size=group_size,
    provenance='trinity',
  )
