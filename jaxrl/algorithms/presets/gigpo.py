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
  """Composes an episode's advantage, ω times a turn's, PPO's clip and a k2 term.

  The paper has γ = 0.95 and a k3 term with a coefficient of 0.01: see `gigpo_paper`.

  Args:
    omega: The weight of the turn term.
    gamma: The discount.
    norm: Whether to divide each term by its standard deviation.
    clip_low: The ratio is clipped below at 1 − clip_low.
    clip_high: The ratio is clipped above at 1 + clip_high.
    kl_coef: The coefficient of the KL term; 0 needs no reference model.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=partial(advantages.gigpo, omega=omega, gamma=gamma, norm=norm),
    policy_loss=partial(losses.ppo_clip, clip_low=clip_low, clip_high=clip_high),
    kl_loss=kl.term(kl.k2, kl_coef),
    group_size=group_size,
    provenance='ours',
  )
