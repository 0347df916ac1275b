"""First steps that train the value head alone: nothing else moves by a single bit."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.training import optimizer
from jaxrl.training.moments import Memory
from jaxrl.types import Array, Params

HEAD = 'value_head'  # the parameters' first key


def init() -> dict[str, Array]:
  """updates: how many there were in the warm-up; only the head's moments saw them."""
  return {'updates': jnp.zeros((), jnp.int32)}


def update(
  params: Params,
  opt_state: Any,
  gradients: Params,
  numbers: dict[str, Any],
  warming: Array,
  own: dict[str, Array],
  memory: Memory,
) -> tuple[Params, Any, dict[str, Array], dict[str, Array]]:
  """`optimizer.update`, of the value head alone where `warming`, a scalar, is True.

  The others' moments, still zero when the warm-up ends, start their bias correction
  then: their count is less by own['updates']. Returns the new `own` last.
  """
  gradients = _join(gradients, _where(warming, _zeros(gradients), gradients))
  late = _later(opt_state, own['updates'])
  head, state, metrics = optimizer.update(params, opt_state, gradients, numbers, memory)
  others, later, _ = optimizer.update(params, late, gradients, numbers, memory)

  def moments(old, new, later):
    is_moments = optimizer.like(old, params)
    return _join(new, _where(warming, old, later)) if is_moments else new

  state = jax.tree.map(
    *(moments, opt_state, state, later), is_leaf=lambda x: optimizer.like(x, params)
  )
  params = _join(head, _where(warming, params, others))
  own = {'updates': own['updates'] + warming}
  return params, state, metrics, own


def _later(state: Any, updates: Array) -> Any:
  """The state as if `updates` of those that were counted had not been."""
  return jax.tree_util.tree_map_with_path(
    lambda path, x: x - updates if getattr(path[-1], 'name', '') == 'count' else x,
    state,
  )


def _join(head: Params, others: Params) -> Params:
  """The value head of one tree with all else of another."""
  return others | {HEAD: head[HEAD]}


def _where(choose: Array, yes: Params, no: Params) -> Params:
  return jax.tree.map(lambda a, b: jnp.where(choose, a, b), yes, no)


def _zeros(tree: Params) -> Params:
  return jax.tree.map(jnp.zeros_like, tree)
