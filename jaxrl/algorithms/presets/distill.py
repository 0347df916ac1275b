"""Distillation: match a teacher's likeliest tokens (arXiv 1503.02531)."""

from functools import partial
from typing import Literal

from jaxrl.functional import losses
from jaxrl.functional.losses.distillation import Kind
from jaxrl.types import Algorithm


def distill(
  *,
  kind: Kind = 'forward',
  top_k: int = 64,
  skew: float = 0.1,
  head: float = 0.5,
  data_format: Literal['messages', 'text', 'rollout'] = 'messages',
  group_size: int = 1,
) -> Algorithm:
  """Builds a divergence to the teacher on conversations, texts or rollouts.

  The paper matches all classes at a raised temperature. The number of tokens and the
  choice of the divergence are our own.

  Args:
    kind: The divergence.
    top_k: How many of the teacher's likeliest tokens count.
    skew: The teacher's share in the skewed divergence.
    head: The teacher's probability of the head in the adaptive divergence.
    data_format: What it learns from: files of messages or texts, or rollouts.
    group_size: Samples per task.

  Returns:
    The algorithm.
  """
  return Algorithm(
    policy_loss=partial(losses.distill, kind=kind, top_k=top_k, skew=skew, head=head),
    data_format=data_format,
    sampler='fifo' if data_format == 'rollout' else 'file',
    group_size=group_size,
    provenance='ours',
  )
