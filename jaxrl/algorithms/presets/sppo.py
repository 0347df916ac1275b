"""sPPO: a log-ratio surrogate inside a trust region (arXiv 2108.05828).

This is Trinity-RFT's sPPO, not self-play preference optimization.
"""

from functools import partial

from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def sppo(
  *,
  epsilon: float = 0.3,
  group_size: int = 8,
) -> Algorithm:
  """Composes A = R − μ and −A·(p−o) while the ratio stays within 1+ε.

  The paper's experiments are not with language models: ε and the group size are
  Trinity-RFT's.

  Args:
    epsilon: The trust region ε of the ratio.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=advantages.opmd,
    policy_loss=partial(losses.sppo, epsilon=epsilon),
    group_size=group_size,
    provenance='trinity',
  )
