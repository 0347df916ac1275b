"""GiGPO: steps from the same state compete too (arXiv 2505.10978)."""

from functools import partial
from typing import Literal

from jaxrl.functional import advantages, kl, losses
from jaxrl.types import Algorithm


def gigpo(
  *,
  omega: float = 1.0,
  gamma: float = 1.0,
  norm: Literal['none', 'std'] = 'none',
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  kl_coef: float = 1e-3,
  group_size: int = 8,
) -> Algorithm:
  """A run's advantage in its task plus ω times a step's at its state; k2."""
  return Algorithm(
    advantage=partial(advantages.gigpo, omega=omega, gamma=gamma, norm=norm),
    policy_loss=partial(losses.ppo_clip, clip_low=clip_low, clip_high=clip_high),
    kl_loss=kl.term(kl.k2, kl_coef),
    group_size=group_size,
  )
