"""A-3PO: decoupled PPO around an interpolated proximal policy (arXiv 2512.06547)."""

from functools import partial

from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def a3po(
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  cap: float = 5.0,
  group_size: int = 8,
) -> Algorithm:
  """Composes group-relative advantages and the clip around a policy in between.

  It reads the sampler's log-probs and each token's age alone: nothing is scored before
  an update. The cap is what AReaL started with, and the group size our own, not the
  paper's.

  Args:
    clip_low: The ratio is clipped below at 1 − clip_low.
    clip_high: The ratio is clipped above at 1 + clip_high.
    cap: Tokens that weigh more than this are left out.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=advantages.grpo,
    policy_loss=partial(losses.a3po, clip_low=clip_low, clip_high=clip_high, cap=cap),
    group_size=group_size,
    provenance='ours',
  )
