"""Continued pretraining on plain texts (arXiv 2004.10964)."""

from jaxrl.call_strings import ComponentCall
from jaxrl.functional import losses
from jaxrl.types import Algorithm


def cpt() -> Algorithm:
  """Builds maximum likelihood of every token but the first of files of texts.

  Returns:
    The algorithm.
  """
  return Algorithm(
    policy_loss=losses.sft,
    data_format='text',
    sampler=ComponentCall('file'),
    provenance='ours',
  )
