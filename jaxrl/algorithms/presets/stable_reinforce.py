"""StableReinforce: ratios and advantages without outliers (arXiv 2505.02835)."""

from functools import partial

from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def stable_reinforce(
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  ratio_low: float = 1e-3,
  ratio_high: float = 1e3,
  max_sigma: float = 3.0,
  group_size: int = 8,
) -> Algorithm:
  """Composes whitened advantages within 3σ and PPO's clip of a bounded ratio.

  The bounds are those of the paper, and the mean over the tokens of each row is that of
  its code, which shifts the bounds of A by the batch's mean return; here they are ±3σ.
  The paper's reward for consistency, which a second model judges, is left out, and so
  is the KL penalty of its script; the group size is our own.

  Args:
    clip_low: The ratio is clipped below at 1 − clip_low.
    clip_high: The ratio is clipped above at 1 + clip_high.
    ratio_low: The ratio is no smaller.
    ratio_high: The ratio is no greater.
    max_sigma: Tokens with a greater |A| have none.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=partial(advantages.reinforce_plus_plus, max_sigma=max_sigma),
    policy_loss=partial(
      losses.stable_reinforce,
      clip_low=clip_low,
      clip_high=clip_high,
      ratio_low=ratio_low,
      ratio_high=ratio_high,
    ),
    aggregation='sequence_mean_token_mean',
    group_size=group_size,
    provenance='ours',
  )
