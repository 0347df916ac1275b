"""LUSPO: GSPO whose rows weigh as much as they are long (arXiv 2602.05261)."""

from functools import partial

from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def luspo(
  *,
  clip_low: float = 2e-3,
  clip_high: float = 2.5e-3,
  group_size: int = 8,
) -> Algorithm:
  """Composes group-relative advantages and clipped sequence ratios, summed over tokens.

  GSPO's mean over a row's tokens divides its gradient by its length; here it is not
  divided. The clip range is that of section 5.1 of the paper, as TRL cites it.

  Args:
    clip_low: The ratio is clipped below at 1 − clip_low.
    clip_high: The ratio is clipped above at 1 + clip_high.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=advantages.grpo,
    policy_loss=partial(
      losses.gspo, clip_low=clip_low, clip_high=clip_high, gradient='mean'
    ),
    aggregation='sequence_mean_token_sum',
    group_size=group_size,
    provenance='trl',
  )
