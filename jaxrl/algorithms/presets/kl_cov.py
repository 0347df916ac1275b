"""KL-cov: a penalty on the tokens of highest covariance (arXiv 2505.22617)."""

from functools import partial

from jaxrl.functional import advantages, losses
from jaxrl.types import Algorithm


def kl_cov(
  *,
  ratio: float = 2e-4,
  coef: float = 1.0,
  group_size: int = 8,
) -> Algorithm:
  """Composes group-relative advantages and an unclipped ratio with few penalties.

  The values are those of verl's config, and not all of them are the paper's.

  Args:
    ratio: The share of tokens that are penalised.
    coef: The coefficient of the penalty |p − o|.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=advantages.grpo,
    policy_loss=partial(losses.kl_cov, ratio=ratio, coef=coef),
    group_size=group_size,
    provenance='verl',
  )
