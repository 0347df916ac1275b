"""Gradients of micro-batches are summed within the backward pass.

`total + gradients` needs both at once. Here the program that computes gradients is
rewritten so that it adds those of a layer to the total as soon as it has them.
"""

import collections
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core.primitives import scan_p

from jaxrl.types import Array, Params, PyTree

# By the variables of a jaxpr.
_Values = dict[PyTree, Array]
_Totals = dict[PyTree, PyTree]


class LayerSums(NamedTuple):
  """Sums of gradients in arrays of their own for each layer, instead of a stack.

  Where layers are unrolled, XLA's CPU backend would copy a stack between one layer's
  addition to it and the next.
  """

  layers: tuple[Array, ...]


def zeros(
  platform: str,
  function: Callable[..., tuple[Params, PyTree]],
  params: Params,
  *arguments: PyTree,
) -> tuple[Params, PyTree]:
  """Returns the total that gradients are first added to.

  Args:
    platform: The platform to compile for.
    function: Returns gradients and something else.
    params: What the gradients are of.
    *arguments: The function's.

  Returns:
    Zeros as `params`, except that on a CPU those of scans which are unrolled whole are
    `LayerSums`; and the shapes of the other result.
  """
  closed, (_, rest) = jax.make_jaxpr(function, return_shape=True)(*arguments)
  total = jax.tree.map(jnp.zeros_like, params)
  if platform != 'cpu':
    return total, rest
  leaves, treedef = jax.tree.flatten(total)
  totals = _read_once(closed.jaxpr, leaves)
  scans = [e for e in closed.jaxpr.eqns if e.primitive is scan_p and _is_unrolled(e)]
  for equation in scans:
    for k, x in _places(equation, totals).items():
      place = closed.jaxpr.outvars.index(equation.outvars[k])
      leaves[place] = LayerSums(tuple(jnp.zeros_like(layer) for layer in x))
  return jax.tree.unflatten(treedef, leaves), rest


def stack_layers(total: Params) -> Params:
  """Returns sums of gradients in the parameters' own structure, without `LayerSums`."""
  return jax.tree.map(
    lambda x: jnp.stack(x.layers) if isinstance(x, LayerSums) else x,
    total,
    is_leaf=lambda x: isinstance(x, LayerSums),
  )


def add(
  platform: str,
  function: Callable[..., tuple[Params, PyTree]],
  total: Params,
  *arguments: PyTree,
) -> tuple[Params, PyTree]:
  """Adds the gradients that a function computes to a total.

  `total + grads` needs both at once, and reads and writes them once more. A scan over
  layers stacks the gradients of one layer after the other in its backward pass. Here it
  adds them to their places in the total instead, so that a second array as large as the
  model is never made. The sums have the same bits.

  Args:
    platform: The platform to compile for. On a GPU gradients are added as a whole: XLA
      would copy each slice of the total before it adds to it, which is 5% more bytes in
      a step of 1.7B, for 5% less memory.
    function: Returns gradients and something else.
    total: What they are added to, in its own types. Those of scans that are unrolled
      whole may be `LayerSums`.
    *arguments: The function's.

  Returns:
    `(total + gradients, the other result)`.
  """
  if platform == 'gpu':
    grads, rest = function(*arguments)
    return jax.tree.map(jnp.add, total, grads), rest
  closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
  jaxpr, treedef = closed.jaxpr, jax.tree.structure(shapes)
  total_leaves, total_treedef = jax.tree.flatten(
    total, is_leaf=lambda x: isinstance(x, LayerSums)
  )
  outputs = jaxpr.outvars[: len(total_leaves)]
  totals = _read_once(jaxpr, total_leaves)
  values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
  values |= dict(zip(jaxpr.invars, jax.tree.leaves(arguments), strict=True))
  before: list[core.JaxprEqn] = []
  added = set()
  for equation in jaxpr.eqns:
    places = _places(equation, totals)
    if not places:
      before.append(equation)
      continue
    _run(jaxpr, before, values)
    before = []
    _run_scan(equation, places, values)
    added.update(equation.outvars[k] for k in places)
  _run(jaxpr, before, values)
  results = [_read(values, v) for v in jaxpr.outvars]
  _, rest = jax.tree.unflatten(treedef, results)
  sums = [
    results[k] if not _is_literal(v) and v in added else jnp.add(x, results[k])
    for k, (v, x) in enumerate(zip(outputs, total_leaves, strict=True))
  ]
  return jax.tree.unflatten(total_treedef, sums), rest


def _read_once(jaxpr: core.Jaxpr, totals: Sequence[PyTree]) -> _Totals:
  """Returns the totals of gradients, the first outputs, that nothing else reads."""
  read = [v for v in jaxpr.outvars if not _is_literal(v)]
  read += [v for e in jaxpr.eqns for v in e.invars if not _is_literal(v)]
  uses = collections.Counter(read)
  outputs = jaxpr.outvars[: len(totals)]
  return {
    v: x
    for v, x in zip(outputs, totals, strict=True)
    if not _is_literal(v) and uses[v] == 1
  }


def _places(equation: core.JaxprEqn, totals: _Totals) -> dict[int, PyTree]:
  """Returns which outputs of a scan are stacks to be added, with their totals."""
  if equation.primitive is not scan_p:
    return {}
  num_stacked = _count_stacked(equation.outvars, equation.params['jaxpr'].out_avals)
  outputs = list(enumerate(equation.outvars))
  stacked = outputs[len(outputs) - num_stacked :]
  found = {k: totals[v] for k, v in stacked if v in totals}

  def keeps_type(k: int, x: PyTree) -> bool:
    dtype = jax.tree.leaves(x)[0].dtype
    return jnp.result_type(dtype, outputs[k][1].aval) == dtype

  return {k: x for k, x in found.items() if keeps_type(k, x)}


def _is_unrolled(equation: core.JaxprEqn) -> bool:
  return equation.params['unroll'] >= equation.params['length'] > 0


def _count_stacked(variables: PyTree, slices: PyTree) -> int:
  """Counts the variables that have one axis more than what the body has of them.

  JAX names these numbers in a scan's parameters, but not alike in all versions.
  """
  pairs = zip(variables, slices, strict=True)
  return sum(v.aval.ndim > x.ndim for v, x in pairs)


def _run_scan(
  equation: core.JaxprEqn, places: dict[int, PyTree], values: _Values
) -> None:
  """Runs a scan that adds some of its outputs to totals instead of stacking them."""
  parameters = equation.params
  program = parameters['jaxpr']
  num_stacked = _count_stacked(equation.outvars, program.out_avals)
  num_carry = len(equation.outvars) - num_stacked
  num_xs = _count_stacked(equation.invars, program.in_avals)
  num_consts = len(equation.invars) - num_carry - num_xs
  inputs = [_read(values, v) for v in equation.invars]
  consts, inputs = inputs[:num_consts], inputs[num_consts:]
  carry, xs = inputs[:num_carry], inputs[num_carry:]
  has_layers = any(isinstance(x, LayerSums) for x in places.values())
  body = core.jaxpr_as_fun(program)
  if has_layers:
    body = jax.jit(body)  # traced once for all layers
  length, reverse = parameters['length'], parameters['reverse']

  def step(state: PyTree, slices: PyTree) -> PyTree:
    (carry, totals), (i, xs) = state, slices
    outputs = body(*consts, *carry, *xs)
    totals = {k: _add_at(total, i, outputs[k]) for k, total in totals.items()}
    stacked = [x for k, x in enumerate(outputs) if k >= num_carry and k not in totals]
    return (outputs[:num_carry], totals), stacked

  if has_layers:
    state, slices = (carry, places), []
    for i in reversed(range(length)) if reverse else range(length):
      layer = [jax.lax.index_in_dim(x, i, keepdims=False) for x in xs]
      state, stacked = step(state, (i, layer))
      slices.append(stacked)
    ordered = slices[::-1] if reverse else slices
    stacked = [jnp.stack(x) for x in zip(*ordered, strict=True)]
    carry, totals = state
  else:
    (carry, totals), stacked = jax.lax.scan(
      step,
      (carry, places),
      (np.arange(length, dtype=np.uint32), xs),
      length=length,
      reverse=reverse,
      unroll=parameters['unroll'],
    )
  rest = iter([*carry, *stacked])
  for k, variable in enumerate(equation.outvars):
    values[variable] = totals[k] if k in totals else next(rest)


def _add_at(total: PyTree, i: Array | int, x: jax.Array) -> PyTree:
  if isinstance(total, LayerSums):
    layers = list(total.layers)
    layers[i] = x + layers[i]
    return LayerSums(tuple(layers))
  added = x + jax.lax.dynamic_index_in_dim(total, i, keepdims=False)
  return jax.lax.dynamic_update_index_in_dim(total, added, i, 0)


def _run(
  jaxpr: core.Jaxpr, equations: Sequence[core.JaxprEqn], values: _Values
) -> None:
  """Runs some equations of a program, and writes down what they compute."""
  made = [v for equation in equations for v in equation.outvars]
  made = [v for v in made if not isinstance(v, core.DropVar)]
  read = [v for e in equations for v in e.invars if not _is_literal(v)]
  given = [v for v in dict.fromkeys(read) if v in values]
  part = jaxpr.replace(eqns=list(equations), invars=given, constvars=[], outvars=made)
  function = core.jaxpr_as_fun(core.ClosedJaxpr(part, ()))
  results = function(*(values[v] for v in given))
  values.update(zip(made, results, strict=True))


def _read(values: _Values, variable: PyTree) -> Array:
  return variable.val if _is_literal(variable) else values[variable]


def _is_literal(variable: PyTree) -> bool:
  return isinstance(variable, core.Literal)
