"""GDPO: rewards are normalised one by one, then added up (arXiv 2601.05242)."""

from functools import partial

from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def gdpo(
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  whiten: bool = True,
  group_size: int = 8,
) -> Algorithm:
  """Composes a sum of group-relative rewards and PPO's clip.

  The paper normalises the sum over the batch, as here. The clip and the group size are
  our own.

  Args:
    clip_low: The ratio is clipped below at 1 − clip_low.
    clip_high: The ratio is clipped above at 1 + clip_high.
    whiten: Whether to whiten the sum over the batch.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=partial(advantages.gdpo, whiten=whiten),
    policy_loss=partial(losses.ppo_clip, clip_low=clip_low, clip_high=clip_high),
    group_size=group_size,
    provenance='ours',
  )
