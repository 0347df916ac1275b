"""Rows that an expert wrote, among rollouts: they enter no statistic of the rollouts.

A file's row is a group of its own: nothing is to be compared with it. So advantages
are made as if such rows were padding, and a row's own is its reward, as it is for any
group of one without a baseline. Rated rows of one prompt are a group and stay in.
"""

import jax.numpy as jnp

from jaxrl.functional import groups
from jaxrl.training.columns import Columns
from jaxrl.types import Advantages, Algorithm, Array


def lone(algorithm: Algorithm, columns: Columns) -> Array:
  """`[B]` bool: expert rows that are a group of their own, in a run that plays."""
  expert = columns['expert_mask']
  if algorithm.schema != 'rollout':
    return jnp.zeros_like(expert)
  ids = columns['task_ids']
  return expert & (groups.spread(groups.total(jnp.ones_like(ids), ids), ids) == 1)


def left_out(columns: Columns, rows: Array) -> Columns:
  """The columns with `rows` `[B]` made padding, for whoever takes statistics."""
  ids = {
    name: jnp.where(rows, -1, columns[name])
    for name in ('task_ids', 'run_ids', 'step_ids')
  }
  return columns | ids | {'mask': columns['mask'] & ~rows[:, None]}


def put_back(made: Advantages, rows: Array, rewards: Array, mask: Array) -> Advantages:
  """The advantages with those of `rows` `[B]`: the row's reward, on its actions.

  rewards: `[B, T]` as they were given. mask: `[B, T]` of all rows.
  """
  rows = rows[:, None]
  own = jnp.where(mask, groups.row_sum(rewards, mask)[:, None], 0)
  returns, keep = made.returns, made.keep
  return Advantages(
    jnp.where(rows, own, made.advantages),
    None if returns is None else jnp.where(rows, own, returns),
    None if keep is None else keep | rows,
    made.metrics,
    made.state,
  )
