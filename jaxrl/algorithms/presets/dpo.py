"""DPO: preferences without a reward model (arXiv 2305.18290)."""

from functools import partial

from jaxrl.functional import losses
from jaxrl.types import Algorithm


def dpo(*, beta: float = 0.1, label_smoothing: float = 0.0) -> Algorithm:
  """Builds −log σ(βΔ) over files of pairs, Δ against the initial policy.

  The hinge of SLiC is the same but for `policy_loss='hinge(beta=.1)'`.

  Args:
    beta: The strength β.
    label_smoothing: The share of labels taken to be wrong.

  Returns:
    The algorithm.
  """
  return Algorithm(
    policy_loss=partial(losses.dpo, beta=beta, label_smoothing=label_smoothing),
    data_format='preference',
    sampler='file',
    batch_unit='pair',
    provenance='paper',
  )
