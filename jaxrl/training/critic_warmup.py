"""Critic warm-up trains the value head alone in the first steps.

During the warm-up no other parameter changes by a single bit.
"""

import jax
import jax.numpy as jnp

from jaxrl.training import optimizers
from jaxrl.training.batch_fields import HParams
from jaxrl.training.optimizers import OptimizerStateSpec
from jaxrl.types import Array, Params, PyTree

VALUE_HEAD = 'value_head'  # top-level key of the value head's parameters


def init_warmup_state() -> dict[str, Array]:
  """Returns the state before the first update.

  Its 'updates' counts the updates of the warm-up, in which only the moments of the
  value head change.
  """
  return {'updates': jnp.zeros((), jnp.int32)}


def apply_gradients_with_warmup(
  params: Params,
  opt_state: PyTree,
  grads: Params,
  hparams: HParams,
  is_warmup: Array,
  warmup_state: dict[str, Array],
  state_spec: OptimizerStateSpec,
) -> tuple[Params, PyTree, dict[str, Array], dict[str, Array]]:
  """Applies one optimizer update; during the warm-up, to the value head alone.

  The moments of the other parameters are still zero when the warm-up ends. Their bias
  correction starts only then, because the updates of the warm-up are subtracted from
  their step count.

  Args:
    params: Trained parameters.
    opt_state: Optimizer state.
    grads: Gradients of `params`.
    hparams: As in `optimizers.apply_gradients`.
    is_warmup: Whether this update belongs to the warm-up, a boolean scalar.
    warmup_state: State of the warm-up.
    state_spec: Options that fix the structure of the optimizer state.

  Returns:
    New parameters, new optimizer state, metrics, and the new state of the warm-up.
  """
  zeros = jax.tree.map(jnp.zeros_like, grads)
  grads = _join(grads, _where(is_warmup, zeros, grads))
  late_state = _subtract_updates(opt_state, warmup_state['updates'])
  head, head_state, metrics = optimizers.apply_gradients(
    params, opt_state, grads, hparams, state_spec
  )
  others, others_state, _ = optimizers.apply_gradients(
    params, late_state, grads, hparams, state_spec
  )

  def select(old: PyTree, head: PyTree, others: PyTree) -> PyTree:
    if not optimizers.same_structure(old, params):
      return head
    return _join(head, _where(is_warmup, old, others))

  opt_state = jax.tree.map(
    select,
    opt_state,
    head_state,
    others_state,
    is_leaf=lambda x: optimizers.same_structure(x, params),
  )
  params = _join(head, _where(is_warmup, params, others))
  warmup_state = {'updates': warmup_state['updates'] + is_warmup}
  return params, opt_state, metrics, warmup_state


def _subtract_updates(opt_state: PyTree, updates: Array) -> PyTree:
  """Subtracts `updates` from every step count in an optimizer state."""
  return jax.tree_util.tree_map_with_path(
    lambda path, x: x - updates if getattr(path[-1], 'name', '') == 'count' else x,
    opt_state,
  )


def _join(head: Params, others: Params) -> Params:
  """Combines the value head of one tree with all other parameters of another."""
  return others | {VALUE_HEAD: head[VALUE_HEAD]}


def _where(condition: Array, yes: Params, no: Params) -> Params:
  return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
