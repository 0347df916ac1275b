"""DAPO: a higher clip, dynamic sampling, a penalty on length (arXiv 2503.14476)."""

from functools import partial

from jaxrl.component_calls import ComponentCall
from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def dapo(
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.28,
  overlong_cache: float = 0.2,
  overlong_length: int | None = None,
  group_size: int = 16,
) -> Algorithm:
  """Composes group-relative advantages and PPO's clip with .2/.28, without KL.

  Like the paper's objective, it has no dual clip.

  Groups all right or all wrong, by accuracy, are replaced by others. Answers of more
  than `overlong_length` − `overlong_cache` tokens lose up to 1: the length is the run's
  own limit where it is None, a cache below 1 a share of it.

  Args:
    clip_low: The ratio is clipped below at 1 − clip_low.
    clip_high: The ratio is clipped above at 1 + clip_high.
    overlong_cache: The length of the soft penalty, in tokens, or below 1 as a share of
      the length.
    overlong_length: The length from which answers lose 1; None is the run's own limit.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  limit = {} if overlong_length is None else {'max_length': overlong_length}
  return Algorithm(
    advantage=advantages.grpo,
    policy_loss=partial(
      losses.ppo_clip, clip_low=clip_low, clip_high=clip_high, dual_clip=None
    ),
    filters=('accuracy',),
    shapers=(ComponentCall('overlong', {**limit, 'cache': overlong_cache}),),
    group_size=group_size,
    provenance='paper',
  )
