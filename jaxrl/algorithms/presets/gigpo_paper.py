"""GiGPO with the values of its paper (arXiv 2505.10978)."""

from functools import partial
from typing import Literal

from jaxrl.functional import advantages, kl, losses
from jaxrl.types import Algorithm


def gigpo_paper(
  *,
  omega: float = 1.0,
  gamma: float = 0.95,
  norm: Literal['none', 'std'] = 'none',
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  kl_coef: float = 0.01,
  group_size: int = 8,
) -> Algorithm:
  """Composes an episode's advantage, ω times a turn's, PPO's clip and a k3 term.

  The values are those of the paper's runs in ALFWorld and WebShop. It reports results
  with and without division by the standard deviation; `norm='std'` divides. Its
  objective has no dual clip.

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
    policy_loss=partial(
      losses.ppo_clip, clip_low=clip_low, clip_high=clip_high, dual_clip=None
    ),
    kl_loss=kl.term(kl.k3, kl_coef),
    group_size=group_size,
    provenance='paper',
  )
