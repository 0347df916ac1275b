"""OPMD: online policy mirror descent with a group baseline (arXiv 2505.17826)."""

from functools import partial
from typing import Literal

from jaxrl.functional import advantages, kl, losses
from jaxrl.types import Algorithm


def opmd(
  *,
  baseline: Literal['mean', 'logavgexp'] = 'mean',
  tau: float = 1.0,
  kl_coef: float = 1e-3,
  group_size: int = 2,
) -> Algorithm:
  """Composes A = R − b, the loss −A·p/(1+τ) and a k2 term to a reference.

  Trinity-RFT's own sampler for OPMD is `warmup`, which first trains on an expert's
  rows. The default here is `fifo`, because `warmup` needs a file of such rows, without
  which a run could not start. With one, set `dataset.expert_path` and
  `algorithm.sampler='warmup(steps=10)'`.

  The paper describes Trinity-RFT; the values are those of its code.

  Args:
    baseline: The baseline that is subtracted.
    tau: The temperature τ.
    kl_coef: The coefficient of the KL term; 0 needs no reference model.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    advantage=partial(advantages.opmd, baseline=baseline, tau=tau),
    policy_loss=partial(losses.opmd, tau=tau),
    kl_loss=kl.term(kl.k2, kl_coef),
    group_size=group_size,
    provenance='trinity',
  )
