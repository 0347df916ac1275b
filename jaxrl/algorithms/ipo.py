"""IPO: preferences regressed to a fixed margin (arXiv 2310.12036)."""

from functools import partial

from jaxrl.functional import losses
from jaxrl.types import Algorithm


def ipo(*, beta: float = 0.1) -> Algorithm:
  """(Δ̄ − 1/(2β))² over files of pairs, Δ̄ against the policy training starts from."""
  return Algorithm(
    policy_loss=partial(losses.ipo, beta=beta),
    schema='preference',
    sampler='file',
    atom='pair',
  )
