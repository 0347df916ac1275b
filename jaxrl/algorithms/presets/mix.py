"""MIX: rollouts and an expert's rows at once (arXiv 2505.17826)."""

from functools import partial

from jaxrl.functional import advantages, entropy, losses
from jaxrl.types import Algorithm


def mix(
  *,
  mu: float = 0.1,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  entropy_coef: float = 0.0,
  group_size: int = 8,
) -> Algorithm:
  """Builds (1−μ)·ppo_clip on rollouts + μ·SFT on expert rows, each over its own rows.

  The paper describes Trinity-RFT; the values are those of its code.

  Args:
    mu: The weight of the expert's rows.
    clip_low: The ratio is clipped below at 1 − clip_low.
    clip_high: The ratio is clipped above at 1 + clip_high.
    entropy_coef: The coefficient of the entropy bonus.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=advantages.grpo,
    policy_loss=partial(losses.mix, mu=mu, clip_low=clip_low, clip_high=clip_high),
    entropy_loss=partial(entropy.mix, coef=entropy_coef) if entropy_coef else None,
    group_size=group_size,
    sampler='mixed',
    provenance='trinity',
  )
