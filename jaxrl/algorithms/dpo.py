"""DPO: preferences without a reward model (arXiv 2305.18290)."""

from functools import partial

from jaxrl.functional import losses
from jaxrl.types import Algorithm


def dpo(*, beta: float = 0.1, label_smoothing: float = 0.0) -> Algorithm:
  """−log σ(βΔ) over files of pairs, Δ against the policy that training starts from.

  The hinge of SLiC is the same but for `policy_loss='hinge(beta=.1)'`.
  """
  return Algorithm(
    policy_loss=partial(losses.dpo, beta=beta, label_smoothing=label_smoothing),
    schema='preference',
    sampler='file',
    atom='pair',
  )
