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
  """Composes GRPO over the reward of the last turn, PPO's clip and a k2 term.

  The paper describes Trinity-RFT; the values are those of its code.

  Args:
    divide_by_steps: Whether to divide the advantage by the episode's number of turns.
    std_threshold: Groups of one, and groups whose rewards have at most this standard
      deviation, are dropped; None drops none.
    clip_low: The ratio is clipped below at 1 − clip_low.
    clip_high: The ratio is clipped above at 1 + clip_high.
    kl_coef: The coefficient of the KL term; 0 needs no reference model.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=partial(
      advantages.step_wise_grpo,
      divide_by_steps=divide_by_steps,
      std_threshold=std_threshold,
    ),
    policy_loss=partial(losses.ppo_clip, clip_low=clip_low, clip_high=clip_high),
    kl_loss=kl.term(kl.k2, kl_coef),
    group_size=group_size,
    provenance='trinity',
  )
