"""Conservative DPO: DPO for labels that may be wrong (Mitchell, 2023)."""

import dataclasses

from jaxrl.algorithms.presets.dpo import dpo
from jaxrl.types import Algorithm


def cdpo(*, beta: float = 0.1, label_smoothing: float = 0.1) -> Algorithm:
  """Builds DPO for labels that are wrong with probability `label_smoothing`.

  −(1−ε)·log σ(βΔ) − ε·log σ(−βΔ), least where σ(βΔ) = 1 − ε. The right ε is the share
  of wrong labels in the data, and the paper names none; 0.1 is what the author's code
  suggests to begin with.

  Args:
    beta: The strength β.
    label_smoothing: The share of labels taken to be wrong.

  Returns:
    The algorithm.
  """
  algorithm = dpo(beta=beta, label_smoothing=label_smoothing)
  return dataclasses.replace(algorithm, provenance='ours')
