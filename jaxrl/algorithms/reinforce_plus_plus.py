"""REINFORCE++: returns whitened over the batch (arXiv 2501.03262)."""

from functools import partial
from typing import Literal

from jaxrl.functional import advantages, kl, losses
from jaxrl.types import Algorithm


def reinforce_plus_plus(
  *,
  gamma: float = 1.0,
  baseline: Literal['none', 'group'] = 'none',
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  kl_coef: float = 1e-3,
  group_size: int = 8,
) -> Algorithm:
  """Whitened returns-to-go, the clipped surrogate, and k1 taken off the rewards."""
  return Algorithm(
    advantage=partial(advantages.reinforce_plus_plus, gamma=gamma, baseline=baseline),
    policy_loss=partial(losses.ppo_clip, clip_low=clip_low, clip_high=clip_high),
    kl_penalty=kl.term(kl.k1, kl_coef),
    group_size=group_size,
  )
