"""Dr. GRPO: no bias by length, none by difficulty (arXiv 2503.20783)."""

from functools import partial

from jaxrl.component_calls import ComponentCall
from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def drgrpo(
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  length: float | None = None,
  group_size: int = 8,
) -> Algorithm:
  """Composes GRPO without division by the standard deviation and a constant length.

  The objective has no KL term and no dual clip. The paper's runs sample 8 answers per
  question and divide by the limit on a response.

  Args:
    clip_low: The ratio is clipped below at 1 − clip_low.
    clip_high: The ratio is clipped above at 1 + clip_high.
    length: The constant length L; None is the run's own limit on a response.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  constant = {} if length is None else {'length': length}
  return Algorithm(
    advantage=partial(advantages.grpo, scale_by_std=False),
    policy_loss=partial(
      losses.ppo_clip, clip_low=clip_low, clip_high=clip_high, dual_clip=None
    ),
    aggregation=ComponentCall('sequence_mean_token_sum_norm', constant),
    group_size=group_size,
    provenance='paper',
  )
