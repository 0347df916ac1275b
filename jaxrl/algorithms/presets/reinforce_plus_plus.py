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
  """Composes whitened returns-to-go, PPO's clip and a k1 penalty on the rewards.

  The paper samples one answer to a prompt, except in its variant with
  `baseline='group'`. The number here and the coefficient of the penalty are our own.

  Args:
    gamma: The discount.
    baseline: The baseline that is subtracted.
    clip_low: The ratio is clipped below at 1 − clip_low.
    clip_high: The ratio is clipped above at 1 + clip_high.
    kl_coef: The coefficient of the KL term; 0 needs no reference model.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=partial(advantages.reinforce_plus_plus, gamma=gamma, baseline=baseline),
    policy_loss=partial(losses.ppo_clip, clip_low=clip_low, clip_high=clip_high),
    kl_penalty=kl.term(kl.k1, kl_coef),
    group_size=group_size,
    provenance='ours',
  )
