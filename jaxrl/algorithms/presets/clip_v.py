"""Clip_V: no push on tokens that would lower the entropy most (arXiv 2602.03392)."""

import dataclasses
from functools import partial

from jaxrl.algorithms.presets.grpo import grpo
from jaxrl.functional import advantages
from jaxrl.types import Algorithm


def clip_v(
  *,
  mu: float = 8.5,
  max_frac: float = 1e-4,
  kl_coef: float = 1e-3,
  group_size: int = 8,
) -> Algorithm:
  """Composes GRPO with a mask of negative tokens by the entropy that they cost.

  Like Trinity-RFT 0.6.0 it also drops tokens of groups with equal rewards, whose
  advantage is 0, from the mean and from KL. The paper gives no reason for that:
  `advantages.clip_v` leaves them in unless `drop_zero` is set.

  Args:
    mu: How many standard deviations make a token an outlier.
    max_frac: The largest share of tokens with A < 0 to drop.
    kl_coef: The coefficient of the KL term; 0 needs no reference model.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return dataclasses.replace(
    grpo(kl_coef=kl_coef, group_size=group_size),
    advantage=partial(advantages.clip_v, mu=mu, max_frac=max_frac, drop_zero=True),
  )
