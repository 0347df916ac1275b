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
  """(1−μ)·ppo_clip on rollouts + μ·SFT on expert rows, each over its own rows."""
  return Algorithm(
    advantage=advantages.grpo,
    policy_loss=partial(losses.mix, mu=mu, clip_low=clip_low, clip_high=clip_high),
    entropy_loss=partial(entropy.mix, coef=entropy_coef) if entropy_coef else None,
    group_size=group_size,
    sampler='mixed',
  )
