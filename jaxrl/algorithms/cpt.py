"""Continued pretraining on plain texts (arXiv 2004.10964)."""

from jaxrl.functional import losses
from jaxrl.types import Algorithm


def cpt() -> Algorithm:
  """Maximum likelihood of every token but the first of files of texts."""
  return Algorithm(policy_loss=losses.sft, schema='text', sampler='file')
