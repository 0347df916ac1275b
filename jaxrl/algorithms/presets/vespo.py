"""VESPO: a soft weight of the whole sequence instead of a clip (arXiv 2602.10693)."""

from functools import partial

from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def vespo(
  *,
  power_positive: float = 2.0,
  decay_positive: float = 3.0,
  power_negative: float = 3.0,
  decay_negative: float = 2.0,
  group_size: int = 8,
) -> Algorithm:
  """Composes group-relative advantages and a Gamma-shaped weight of sequence ratios.

  The values are TRL's; the paper is named only as their source.

  Args:
    power_positive: The ratio's exponent k where A ≥ 0.
    decay_positive: The decay λ where A ≥ 0.
    power_negative: The ratio's exponent k where A < 0.
    decay_negative: The decay λ where A < 0.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=advantages.grpo,
    policy_loss=partial(
      losses.vespo,
      power_positive=power_positive,
      decay_positive=decay_positive,
      power_negative=power_negative,
      decay_negative=decay_negative,
    ),
    group_size=group_size,
    provenance='trl',
  )
