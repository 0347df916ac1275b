"""RAFT: fine-tuning on the best answers found (arXiv 2304.06767)."""

from functools import partial
from typing import Literal

from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def raft(
  *,
  threshold: float = 0.0,
  data_format: Literal['rollout', 'messages'] = 'rollout',
  group_size: int = 8,
) -> Algorithm:
  """Maximises the likelihood of each task's best samples above `threshold`.

  The paper keeps the best sample of a prompt whatever its reward: the threshold is our
  own.

  Args:
    threshold: Episodes with at most this reward are left out.
    data_format: Where samples come from: 'rollout' plays them, 'messages' reads rated
      ones from files.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=partial(advantages.best_of_group, threshold=threshold),
    policy_loss=losses.sft,
    data_format=data_format,
    group_size=group_size,
    provenance='ours',
  )
