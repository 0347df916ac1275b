"""REINFORCE by steps: normalised discounted returns (arXiv 2506.06122)."""

from functools import partial
from typing import Literal

from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def step_reinforce(
  *,
  gamma: float = 1.0,
  over: Literal['batch', 'group'] = 'batch',
  group_size: int = 8,
) -> Algorithm:
  """Composes turn returns normalised over batch or group and a policy gradient.

  The paper describes the system that this is from, ROLL. The values are our own.

  Args:
    gamma: The discount.
    over: What mean and standard deviation are over.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=partial(advantages.step_reinforce, gamma=gamma, over=over),
    policy_loss=losses.vanilla,
    group_size=group_size,
    provenance='ours',
  )
