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
  """Group-relative advantages, length-normalised sequence ratios, k2 to a reference."""
  return Algorithm(
    advantage=advantages.grpo,
    policy_loss=partial(
      losses.gspo, clip_low=clip_low, clip_high=clip_high, level=level
    ),
    kl_loss=kl.term(kl.k2, kl_coef),
    aggregation='sequence_mean_token_mean',
    group_size=group_size,
  )
