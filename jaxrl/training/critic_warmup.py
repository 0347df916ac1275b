"""First steps that train the value head alone: nothing else moves by a single bit."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.training import optimizer
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
) -> tuple[Params, Any, dict[str, Array], dict[str, Array]]:
  """`optimizer.update`, of the value head alone where `warming`, a scalar, is True.

  The others' moments, still zero when the warm-up ends, start their bias correction
  then: their count is less by own['updates']. Returns the new `own` last.
  """
  adam, *rest = opt_state
  gradients = _join(gradients, _where(warming, _zeros(gradients), gradients))
  late = (adam._replace(count=adam.count - own['updates']), *rest)
  head, (moments, *rest), metrics = optimizer.update(
    params, opt_state, gradients, numbers
  )
  others = optimizer.update(params, late, gradients, numbers)[0]
  params = _join(head, _where(warming, params, others))
  moments = moments._replace(
    mu=_join(moments.mu, _where(warming, adam.mu, moments.mu)),
    nu=_join(moments.nu, _where(warming, adam.nu, moments.nu)),
  )
  own = {'updates': own['updates'] + warming}
  return params, (moments, *rest), metrics, own


def _join(head: Params, others: Params) -> Params:
  """The value head of one tree with all else of another."""
  return others | {HEAD: head[HEAD]}


def _where(choose: Array, yes: Params, no: Params) -> Params:
  return jax.tree.map(lambda a, b: jnp.where(choose, a, b), yes, no)


def _zeros(tree: Params) -> Params:
  return jax.tree.map(jnp.zeros_like, tree)
