"""Cross-episode returns: a task is played several times (cf. arXiv 1611.02779).

Each episode is credited with the rewards of the later ones that it prepares, as in
RL².
"""

from functools import partial
from typing import Literal

from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def cod(
  *,
  future: Literal['mean', 'sliding', 'discounted'] = 'mean',
  window: int = 2,
  gamma: float = 0.9,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  group_size: int = 8,
) -> Algorithm:
  """Composes rewards-to-go over an episode's plays, group-relative, and PPO's clip.

  The paper optimizes with TRPO. The comparison within groups and all values are our
  own.

  Args:
    future: Which later rewards an episode is judged by.
    window: The episodes that 'sliding' averages.
    gamma: The discount.
    clip_low: The ratio is clipped below at 1 − clip_low.
    clip_high: The ratio is clipped above at 1 + clip_high.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=partial(advantages.cod, future=future, window=window, gamma=gamma),
    policy_loss=partial(losses.ppo_clip, clip_low=clip_low, clip_high=clip_high),
    group_size=group_size,
    provenance='ours',
  )
