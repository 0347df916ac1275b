"""GRPO with process supervision, with its paper's values (arXiv 2402.03300)."""

from functools import partial

from jaxrl.functional import advantages, kl, losses
from jaxrl.types import Algorithm


def process_grpo(
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  kl_coef: float = 0.04,
  scale_by_std: bool = True,
  group_size: int = 64,
) -> Algorithm:
  """Composes group-relative rewards of steps, PPO's clip and a k3 term to a reference.

  A token's advantage is the sum of the normalised rewards of the steps that end at or
  after it (section 4.1.3). A term of `rollout.rewards` with `step_end` rewards steps;
  without one, each turn is a step. All else is as in `grpo_paper`.

  Args:
    clip_low: The ratio is clipped below at 1 − clip_low.
    clip_high: The ratio is clipped above at 1 + clip_high.
    kl_coef: The coefficient of the KL term; 0 needs no reference model.
    scale_by_std: Whether to divide by the standard deviation of the steps' rewards.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=partial(advantages.process_grpo, scale_by_std=scale_by_std),
    policy_loss=partial(
      losses.ppo_clip, clip_low=clip_low, clip_high=clip_high, dual_clip=None
    ),
    kl_loss=kl.term(kl.k3, kl_coef),
    aggregation='sequence_mean_token_mean',
    group_size=group_size,
    provenance='paper',
  )
