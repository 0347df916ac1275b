"""What training changes, and the columns that parts of an algorithm may read."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.algorithms import compose
from jaxrl.models.model import Model
from jaxrl.types import Algorithm, Array, Batch, Params

# Columns every batch on the devices has; others only when a part reads them.
ALWAYS = (
  'tokens',
  'segment_ids',
  'action_mask',
  'rollout_logprobs',
  'rewards',
  'task_ids',
  'run_ids',
  'step_ids',
  'expert_mask',
)
WIDE = ('weights_version', 'teacher_logprobs')  # [B, T], when read
NARROW = ('pair_ids', 'state_hash')  # [B], when read


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """params and moments: float32. algorithm_state: what adaptive parts carry."""

  params: Params
  opt_state: Any
  algorithm_state: Any = None


@dataclasses.dataclass(frozen=True)
class Spec:
  """Everything static that a step depends on; hashable, so programs are shared.

  algorithm: without its numeric options. micro_batches: how many a minibatch is
  split into. entropy: whether the exact entropy is computed though no loss reads it.
  """

  model: Model
  algorithm: Algorithm
  micro_batches: int = 1
  entropy: bool = False

  @property
  def needs(self) -> frozenset[str]:
    return compose.needs(self.algorithm)

  @property
  def reads(self) -> frozenset[str]:
    """Every column that any part reads."""
    parts = [*compose.parts(self.algorithm).values(), self.algorithm.prepare]
    return frozenset(name for part in parts if part for name in compose.columns(part))

  @property
  def reads_before(self) -> frozenset[str]:
    """The columns read before the first update of a batch."""
    parts = (self.algorithm.advantage, self.algorithm.kl_penalty)
    return frozenset(name for part in parts if part for name in compose.columns(part))

  @property
  def prepares(self) -> bool:
    """Whether anything happens to a batch before its first update."""
    scored = self.needs & {'old_logprobs', 'ref_logprobs', 'values'}
    return bool(scored or self.reads_before)

  @property
  def batch_columns(self) -> tuple[str, ...]:
    """The columns the learner hands to the devices."""
    return ALWAYS + tuple(n for n in (*WIDE, *NARROW) if n in self.reads)


def columns_of(batch: Batch, behaviour: str, state: Any) -> dict[str, Any]:
  """The batch as parts name its columns; `state` is the algorithm's own.

  Before an update 'logprobs' and 'values' are the behaviour policy's; the loss puts
  the fresh ones in their place.
  """
  old = batch.old_logprobs if behaviour == 'decoupled' else batch.rollout_logprobs
  return {
    'mask': batch.action_mask,
    'rewards': batch.rewards,
    'rollout_logprobs': batch.rollout_logprobs,
    'old_logprobs': old,
    'logprobs': old,
    'ref_logprobs': batch.ref_logprobs,
    'teacher_logprobs': batch.teacher_logprobs,
    'values': batch.values,
    'old_values': batch.values,
    'advantages': batch.advantages,
    'returns': batch.returns,
    'task_ids': batch.task_ids,
    'run_ids': batch.run_ids,
    'step_ids': batch.step_ids,
    'pair_ids': batch.pair_ids,
    'expert_mask': batch.expert_mask,
    'weights_version': batch.weights_version,
    'state_hash': batch.state_hash,
    'state': state,
  }


def select_rows(batch: Batch, index: Array) -> Batch:
  """Rows `index` `[R]` of a batch; −1 makes a padding row."""
  there = index >= 0
  batch = jax.tree.map(lambda x: x[jnp.maximum(index, 0)], batch)
  ids = {
    name: jnp.where(there, value, -1)
    for name in ('task_ids', 'run_ids', 'step_ids', 'pair_ids')
    if (value := getattr(batch, name)) is not None
  }
  return batch.replace(action_mask=batch.action_mask & there[:, None], **ids)
