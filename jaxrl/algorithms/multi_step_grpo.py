"""Multi-step GRPO: the last step judges all of a run (arXiv 2505.17826)."""

from functools import partial

from jaxrl.functional import advantages, kl, losses
from jaxrl.types import Algorithm


def multi_step_grpo(
  *,
  divide_by_steps: bool = False,
  std_threshold: float | None = None,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  kl_coef: float = 1e-3,
  group_size: int = 8,
) -> Algorithm:
  """GRPO over the reward of each run's last step, given to every step; k2."""
  return Algorithm(
    advantage=partial(
      advantages.step_wise_grpo,
      divide_by_steps=divide_by_steps,
      std_threshold=std_threshold,
    ),
    policy_loss=partial(losses.ppo_clip, clip_low=clip_low, clip_high=clip_high),
    kl_loss=kl.term(kl.k2, kl_coef),
    group_size=group_size,
  )
