"""IPO: preferences regressed to a fixed margin (arXiv 2310.12036)."""

from functools import partial

from jaxrl.functional import losses
from jaxrl.types import Algorithm


def ipo(*, beta: float = 0.1) -> Algorithm:
  """Builds (Δ̄ − 1/(2β))² over files of pairs, Δ̄ against the initial policy.

  The paper's experiments are bandits: it recommends no β for language models.

  Args:
    beta: The strength β.

  Returns:
    The algorithm.
  """
  return Algorithm(
    policy_loss=partial(losses.ipo, beta=beta),
    data_format='preference',
    sampler='file',
    batch_unit='pair',
    provenance='ours',
  )
