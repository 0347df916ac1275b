"""SAPO: a sigmoid gate on the ratio instead of a clip (arXiv 2511.20347)."""

from functools import partial

from jaxrl.functional import advantages, kl, losses
from jaxrl.types import Algorithm


def sapo(
  *,
  tau_positive: float = 1.0,
  tau_negative: float = 1.05,
  kl_coef: float = 1e-3,
  group_size: int = 8,
) -> Algorithm:
  """Composes group-relative advantages, soft gates and a k2 term to a reference.

  The temperatures are the paper's. Its objective has no KL term: see `sapo_paper`.

  Args:
    tau_positive: τ where the advantage is positive.
    tau_negative: τ elsewhere.
    kl_coef: The coefficient of the KL term; 0 needs no reference model.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=advantages.grpo,
    policy_loss=partial(
      losses.sapo, tau_positive=tau_positive, tau_negative=tau_negative
    ),
    kl_loss=kl.term(kl.k2, kl_coef),
    aggregation='sequence_mean_token_mean',
    group_size=group_size,
    provenance='ours',
  )
