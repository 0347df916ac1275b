"""Supervised fine-tuning on the assistant's turns (arXiv 2203.02155)."""

from jaxrl.functional import losses
from jaxrl.types import Algorithm


def sft() -> Algorithm:
  """Builds maximum likelihood of the action tokens of files of messages.

  Learning rate and number of epochs are those of the config, not the paper's.

  Returns:
    The algorithm.
  """
  return Algorithm(
    policy_loss=losses.sft,
    data_format='messages',
    sampler='file',
    provenance='ours',
  )
