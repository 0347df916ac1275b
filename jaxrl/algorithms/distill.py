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
  schema: Literal['messages', 'text', 'rollout'] = 'messages',
  group_size: int = 1,
) -> Algorithm:
  """A divergence to the teacher on written conversations or texts, or on rollouts."""
  return Algorithm(
    policy_loss=partial(losses.distill, kind=kind, top_k=top_k, skew=skew, head=head),
    schema=schema,
    sampler='fifo' if schema == 'rollout' else 'file',
    group_size=group_size,
  )
