"""Batch fields name the arrays of a batch as algorithm components read them.

A component (advantage, policy loss, …) lists the fields it reads as its positional
parameters. This module says which fields a batch has on the devices, converts a `Batch`
into a dict of fields, selects its rows, and computes the fields that components marked
with `precompute` derive from a whole minibatch. It also takes rows that are a group of
their own out of the statistics of the others.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.algorithms import requirements
from jaxrl.component_table import component_name
from jaxrl.functional import components, reductions
from jaxrl.options import defaults
from jaxrl.types import Advantages, Algorithm, Array, Batch, PyTree

BatchFields = dict[str, PyTree]  # field name → array; images are a tree
HParams = dict[str, Any]  # the traced options of a step; see `train_step`

# Fields that every batch has on the devices.
REQUIRED_FIELDS = (
  'tokens',
  'segment_ids',
  'action_mask',
  'rollout_logprobs',
  'rewards',
  'group_ids',
  'episode_ids',
  'turn_ids',
  'expert_mask',
  'loss_weights',
)
# Further fields, present only if a component reads them.
TOKEN_FIELDS = ('weights_version', 'step_ends')  # [B, T]
REWARD_FIELDS = ('reward_terms', 'reward_weights')  # [B, MAX_REWARD_TERMS]
ROW_FIELDS = (
  'pair_ids',
  'state_hash',
  'role_ids',
  'greedy_mask',
  *REWARD_FIELDS,
)  # [B]
TEACHER_FIELDS = (
  'teacher_logprobs',
  'teacher_topk_ids',
  'teacher_topk_logprobs',
  'teacher_mask',
)
TOPK_FIELDS = frozenset(TEACHER_FIELDS[1:3])  # [B, T, K]
# Present only for models that see images, and in batches that have some.
IMAGE_FIELDS = ('image_features', 'image_positions', 'patch_rows')
# Required and optional fields of shape [B].
PER_ROW_FIELDS = (
  'group_ids',
  'episode_ids',
  'turn_ids',
  'expert_mask',
  'loss_weights',
  *ROW_FIELDS,
)
# Fields that are not int32.
FIELD_DTYPES = {
  'action_mask': jnp.bool_,
  'expert_mask': jnp.bool_,
  'greedy_mask': jnp.bool_,
  'step_ends': jnp.bool_,
  'rollout_logprobs': jnp.float32,
  'rewards': jnp.float32,
  'loss_weights': jnp.float32,
  'reward_terms': jnp.float32,
  'reward_weights': jnp.float32,
  'teacher_logprobs': jnp.float32,
  'teacher_topk_logprobs': jnp.float32,
  'teacher_mask': jnp.bool_,
  'routed_experts': jnp.int16,
}
# Components may sum over these ids, so they must be dense among the selected rows.
DENSE_IDS = ('group_ids', 'episode_ids', 'pair_ids')
SHARED_FIELDS = ('step', 'key', 'state')  # the same for all rows


def make_batch_fields(
  algorithm: Algorithm, batch: Batch, state: dict[str, PyTree], hparams: HParams
) -> BatchFields:
  """Returns the batch as a dict of fields, under the names that components use.

  Before an update, 'logprobs' and 'values' are those of the behavior policy; the loss
  replaces them with the outputs of its own forward pass.

  Args:
    algorithm: Decides which log-probabilities 'old_logprobs' are, and whether a 'key'
      is needed.
    batch: The batch, or the selected rows of one, on the devices.
    state: The algorithm's state by component; `prepare` reads its own as 'state'.
    hparams: The traced options; the 'key' field folds their 'seed' and 'step'.

  Returns:
    The arrays by field name; None for a field that the batch does not have.
  """
  decoupled = requirements.old_logprobs_source(algorithm) == 'decoupled'
  old_logprobs = batch.old_logprobs if decoupled else batch.rollout_logprobs
  fields = {
    'mask': batch.action_mask,
    'rewards': batch.rewards,
    'rollout_logprobs': batch.rollout_logprobs,
    'old_logprobs': old_logprobs,
    'logprobs': old_logprobs,
    'ref_logprobs': batch.ref_logprobs,
    'teacher_logprobs': batch.teacher_logprobs,
    'teacher_topk_ids': batch.teacher_topk_ids,
    'teacher_topk_logprobs': batch.teacher_topk_logprobs,
    'teacher_mask': batch.teacher_mask,
    'values': batch.values,
    'old_values': batch.values,
    'advantages': batch.advantages,
    'returns': batch.returns,
    'group_ids': batch.group_ids,
    'episode_ids': batch.episode_ids,
    'turn_ids': batch.turn_ids,
    'pair_ids': batch.pair_ids,
    'expert_mask': batch.expert_mask,
    'greedy_mask': batch.greedy_mask,
    'loss_weights': batch.loss_weights,
    'weights_version': batch.weights_version,
    'state_hash': batch.state_hash,
    'role_ids': batch.role_ids,
    'reward_terms': batch.reward_terms,
    'reward_weights': batch.reward_weights,
    'step_ends': batch.step_ends,
    'routed_experts': batch.routed_experts,
    'image_features': batch.image_features,
    'image_positions': batch.image_positions,
    'state': state.get('prepare'),
    'step': hparams['step'],
  }
  if 'key' in requirements.fields_read(algorithm):
    fields['key'] = jax.random.fold_in(jax.random.key(hparams['seed']), hparams['step'])
  return fields


def select_batch_rows(batch: Batch, index: Array) -> Batch:
  """Selects rows of a batch.

  Args:
    batch: The batch, `[B, …]`.
    index: `[R]` int32 row numbers; −1 makes a padding row.

  Returns:
    A batch of R rows. Padding rows have ids −1 and no action.
  """
  is_row, images = index >= 0, batch.patch_rows  # of all rows
  rows = batch.replace(patch_rows=None)
  batch = jax.tree.map(lambda x: x[jnp.maximum(index, 0)], rows)
  ids = {
    name: jnp.where(is_row, value, -1)
    for name in ('group_ids', 'episode_ids', 'turn_ids', 'pair_ids')
    if (value := getattr(batch, name)) is not None
  }
  mask = batch.action_mask & is_row[:, None]
  return batch.replace(action_mask=mask, patch_rows=images, **ids)


def densify_ids(fields: BatchFields, names: frozenset[str]) -> BatchFields:
  """Renumbers ids so that they are below the number of rows at hand.

  Args:
    fields: Arrays by field name, with any number of rows.
    names: The fields that components read; ids among them are renumbered.

  Returns:
    The fields with dense ids.
  """
  dense = {
    name: reductions.unique_pair_ids(fields[name], fields[name])
    for name in DENSE_IDS
    if name in names and fields.get(name) is not None
  }
  return fields | dense


def split_shared(fields: BatchFields) -> tuple[BatchFields, BatchFields]:
  """Separates fields with a row axis from those that all rows share.

  Returns:
    `(row_fields, shared_fields)`.
  """
  shared = {
    name: value
    for name, value in fields.items()
    if name in SHARED_FIELDS or (value is not None and value.ndim == 0)
  }
  return {k: v for k, v in fields.items() if k not in shared}, shared


def precompute_fns(
  algorithm: Algorithm, *, reads_logprobs: bool
) -> dict[str, Callable[..., BatchFields]]:
  """Finds the functions that compute fields of a whole minibatch.

  Args:
    algorithm: Its components may declare `precompute`.
    reads_logprobs: Selects the functions that read the current parameters'
      log-probabilities if True, and the others if False.

  Returns:
    The functions by component.
  """
  functions = {
    component: components.component_info(part).precompute
    for component, part in requirements.components_of(algorithm).items()
  }
  return {
    component: function
    for component, function in functions.items()
    if function and ('logprobs' in components.fields_of(function)) == reads_logprobs
  }


def precompute_fields(
  algorithm: Algorithm, fields: BatchFields, hparams: HParams, *, reads_logprobs: bool
) -> BatchFields:
  """Computes the fields that the components' `precompute` functions provide.

  Args:
    algorithm: Its components may declare `precompute`.
    fields: Fields of the whole minibatch.
    hparams: The traced options; 'parts' holds those of each component.
    reads_logprobs: As in `precompute_fns`.

  Returns:
    The new fields by name, without gradient.
  """
  precomputed = {}
  fields = fields | {'aggregation': component_name(algorithm.aggregation)}
  functions = precompute_fns(algorithm, reads_logprobs=reads_logprobs)
  for component, function in functions.items():
    part = getattr(algorithm, component)
    options = defaults(components.function_of(part))
    options |= components.options_of(part) | hparams['parts'].get(component, {})
    accepted = inspect.signature(function).parameters.keys()
    accepted -= set(components.fields_of(function))
    options = {name: options[name] for name in accepted & options.keys()}
    precomputed |= components.call_component(function, fields, options)
  return jax.lax.stop_gradient(precomputed)


def teacher_fields(algorithm: Algorithm) -> tuple[str, ...]:
  """Returns the names of the teacher fields that a batch needs for an algorithm."""
  read = set(requirements.fields_read(algorithm))
  if read & TOPK_FIELDS:
    read |= TOPK_FIELDS
  return tuple(name for name in TEACHER_FIELDS if name in read)


def asks_other_models(algorithm: Algorithm) -> bool:
  """Returns whether teacher fields come from models other than the policy itself."""
  return bool(teacher_fields(algorithm)) and algorithm.self_teacher is None


def teacher_top_k(algorithm: Algorithm) -> int:
  """Returns how many of the teacher's likeliest tokens an algorithm reads.

  Args:
    algorithm: Each component that reads top-k fields has an option `top_k`.

  Returns:
    The largest `top_k`, or 0 if no component reads top-k fields.

  Raises:
    ValueError: A component reads top-k fields but its `top_k` is not a positive int.
  """
  widths = [0]
  for component, part in requirements.components_of(algorithm).items():
    if TOPK_FIELDS & set(components.fields_of(part)):
      options = defaults(components.function_of(part))
      top_k = (options | components.options_of(part)).get('top_k')
      if not isinstance(top_k, int) or top_k < 1:
        raise ValueError(
          f'algorithm.{component}: top_k={top_k!r} must be at least 1: it is the '
          "number of a teacher's likeliest tokens to read"
        )
      widths.append(top_k)
  return max(widths)


def singleton_rows(algorithm: Algorithm, fields: BatchFields) -> Array:
  """Finds expert rows that are a group of their own, among rollouts.

  Args:
    algorithm: Without rollouts, no row is singled out.
    fields: Fields of the batch.

  Returns:
    `[B]` bool.
  """
  expert = fields['expert_mask']
  if algorithm.data_format != 'rollout':
    return jnp.zeros_like(expert)
  ids = fields['group_ids']
  group_sizes = reductions.gather(reductions.segment_sum(jnp.ones_like(ids), ids), ids)
  return expert & (group_sizes == 1)


def mask_out_rows(fields: BatchFields, rows: Array) -> BatchFields:
  """Turns rows into padding, so that they enter no statistic.

  Args:
    fields: Fields of the batch.
    rows: `[B]` bool, the rows to mask out.

  Returns:
    The fields, with ids −1 and no action in these rows.
  """
  ids = {
    name: jnp.where(rows, -1, fields[name])
    for name in ('group_ids', 'episode_ids', 'turn_ids')
  }
  return fields | ids | {'mask': fields['mask'] & ~rows[:, None]}


def restore_rows(
  result: Advantages, rows: Array, rewards: Array, mask: Array
) -> Advantages:
  """Sets the advantages of rows that were masked out to their rewards.

  Args:
    result: The advantages of the other rows.
    rows: `[B]` bool, the rows that were masked out.
    rewards: `[B, T]`, as the environment gave them.
    mask: `[B, T]` action mask of all rows.

  Returns:
    The advantages of all rows; those of `rows` are their total reward on each action.
  """
  rows = rows[:, None]
  row_rewards = jnp.where(mask, reductions.row_sum(rewards, mask)[:, None], 0)
  returns, keep = result.returns, result.keep
  return Advantages(
    jnp.where(rows, row_rewards, result.advantages),
    None if returns is None else jnp.where(rows, row_rewards, returns),
    None if keep is None else keep | rows,
    result.metrics,
    result.state,
  )
