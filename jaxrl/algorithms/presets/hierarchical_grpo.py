"""Hierarchical GRPO: solvers meet solvers of their problem (prime-rl, 2026)."""

from functools import partial

from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def hierarchical_grpo(
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  episode_role: int = 1,
  group_size: int = 8,
) -> Algorithm:
  """Composes rewards relative to peers of the same role and PPO's clip.

  There is no paper. prime-rl gives a row without peers no advantage; here it has its
  own reward.

  Args:
    clip_low: The ratio is clipped below at 1 − clip_low.
    clip_high: The ratio is clipped above at 1 + clip_high.
    episode_role: The role whose rows are compared within an episode.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=partial(advantages.hierarchical_grpo, episode_role=episode_role),
    policy_loss=partial(losses.ppo_clip, clip_low=clip_low, clip_high=clip_high),
    group_size=group_size,
    provenance='ours',
  )
