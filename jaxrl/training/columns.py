"""The batch as parts name its columns, its rows chosen, split and joined again."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl import signature
from jaxrl.algorithms import compose
from jaxrl.functional import groups, marks
from jaxrl.training.state import Spec
from jaxrl.types import Array, Batch

Columns = dict[str, Any]
Numbers = dict[str, Any]
# Of these, parts may take sums, so they must be dense among the rows at hand.
IDS = ('task_ids', 'run_ids', 'pair_ids')
SHARED = ('step', 'key', 'state')  # the same for all rows


def columns_of(
  spec: Spec, batch: Batch, state: dict[str, Any], numbers: Numbers
) -> Columns:
  """The batch as parts name its columns; `state` is that of `prepare`.

  Before an update 'logprobs' and 'values' are the behaviour policy's; the loss puts
  the fresh ones in their place. 'key' folds the learner's seed and step.
  """
  decoupled = compose.behaviour(spec.algorithm) == 'decoupled'
  old = batch.old_logprobs if decoupled else batch.rollout_logprobs
  columns = {
    'mask': batch.action_mask,
    'rewards': batch.rewards,
    'rollout_logprobs': batch.rollout_logprobs,
    'old_logprobs': old,
    'logprobs': old,
    'ref_logprobs': batch.ref_logprobs,
    'teacher_logprobs': batch.teacher_logprobs,
    'teacher_topk_ids': batch.teacher_topk_ids,
    'teacher_topk_logprobs': batch.teacher_topk_logprobs,
    'values': batch.values,
    'old_values': batch.values,
    'advantages': batch.advantages,
    'returns': batch.returns,
    'task_ids': batch.task_ids,
    'run_ids': batch.run_ids,
    'step_ids': batch.step_ids,
    'pair_ids': batch.pair_ids,
    'expert_mask': batch.expert_mask,
    'greedy_mask': batch.greedy_mask,
    'loss_weights': batch.loss_weights,
    'weights_version': batch.weights_version,
    'state_hash': batch.state_hash,
    'routed_experts': batch.routed_experts,
    'state': state.get('prepare'),
    'step': numbers['step'],
  }
  if 'key' in spec.reads:
    columns['key'] = jax.random.fold_in(
      jax.random.key(numbers['seed']), numbers['step']
    )
  return columns


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


def renumbered(columns: Columns, read: frozenset[str]) -> Columns:
  """The columns with those ids that are read made dense: below the number of rows."""
  dense = {
    name: groups.pair_up(columns[name], columns[name])
    for name in IDS
    if name in read and columns.get(name) is not None
  }
  return columns | dense


def parted(columns: Columns) -> tuple[Columns, Columns]:
  """(columns with a row for each row, those that all rows share)."""
  shared = {
    name: value
    for name, value in columns.items()
    if name in SHARED or (value is not None and value.ndim == 0)
  }
  return {k: v for k, v in columns.items() if k not in shared}, shared


def by_rows(spec: Spec, x: Array) -> Array:
  """Pins `[R, …]` to the mesh, rows split."""
  return spec.model.constrain(x, 'rows', *(None,) * (x.ndim - 1))


def in_chunks(
  spec: Spec, chunks: int, function: Callable[..., Any], *arrays: Array | None
) -> Any:
  """`function` of the arrays `[N, …]`, a chunk of rows after the other, joined."""

  def body(_, inputs):
    return None, function(*jax.tree.map(lambda x: by_rows(spec, x), inputs))

  split = jax.tree.map(lambda x: x.reshape(chunks, -1, *x.shape[1:]), arrays)
  found = jax.lax.scan(body, None, split)[1]
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)


def makers(spec: Spec, *, fresh: bool) -> dict[str, Callable[..., Columns]]:
  """What makes columns of the whole batch, by slot.

  fresh: those that read the current parameters' log-probs, or else those that do not.
  """
  made = {
    slot: marks.make_columns(compose.function_of(part))
    for slot, part in compose.parts(spec.algorithm).items()
  }
  return {
    slot: make
    for slot, make in made.items()
    if make and ('logprobs' in compose.columns(make)) == fresh
  }


def make_columns(
  spec: Spec, columns: Columns, numbers: Numbers, *, fresh: bool
) -> Columns:
  """The columns that parts marked `over_batch` read, without gradient."""
  found = {}
  columns = columns | {'aggregation': spec.algorithm.aggregation}
  for slot, make in makers(spec, fresh=fresh).items():
    part = getattr(spec.algorithm, slot)
    options = signature.defaults(compose.function_of(part))
    options |= compose.options_of(part) | numbers['parts'].get(slot, {})
    takes = inspect.signature(make).parameters.keys() - set(compose.columns(make))
    options = {name: options[name] for name in takes & options.keys()}
    found |= compose.call_part(make, columns, options)
  return jax.lax.stop_gradient(found)
