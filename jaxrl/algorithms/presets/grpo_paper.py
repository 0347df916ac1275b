"""GRPO with the values of its paper, DeepSeekMath (arXiv 2402.03300)."""

from functools import partial

from jaxrl.functional import advantages, kl, losses
from jaxrl.types import Algorithm


def grpo_paper(
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  kl_coef: float = 0.04,
  group_size: int = 64,
) -> Algorithm:
  """Composes GRPO with a k3 term to a reference and equal weights of all replies.

  The paper gives the coefficient and the group size; its clip range is PPO's usual one.
  Its objective has no dual clip.

  Args:
    clip_low: The ratio is clipped below at 1 − clip_low.
    clip_high: The ratio is clipped above at 1 + clip_high.
    kl_coef: The coefficient of the KL term; 0 needs no reference model.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=advantages.grpo,
    policy_loss=partial(
      losses.ppo_clip, clip_low=clip_low, clip_high=clip_high, dual_clip=None
    ),
    kl_loss=kl.term(kl.k3, kl_coef),
    aggregation='sequence_mean_token_mean',
    group_size=group_size,
    provenance='paper',
  )
