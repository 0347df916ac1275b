"""Continued pretraining on plain texts (arXiv 2004.10964)."""

from jaxrl.functional import losses
from jaxrl.types import Algorithm


def cpt() -> Algorithm:
  """Builds maximum likelihood of every token but the first of files of texts.

  Learning rate and number of epochs are those of the config, not the paper's.

  Returns:
    The algorithm.
  """
  return Algorithm(
    policy_loss=losses.sft,
    data_format='text',
    sampler='file',
    provenance='ours',
  )
