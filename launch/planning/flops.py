"""Counts the floating-point operations of a traced program's matrix products."""

import math
from collections.abc import Iterator
from typing import Any

# Functions of `kernels.grouped_matmul`, whose loops end where the data say.
GROUPED_MATMULS = ('grouped_product', 'grouped_outer')


def count_flops(jaxpr: Any, loop_rounds: int = 1, expert_shards: int = 1) -> float:
  """Counts multiplications and additions of all devices together.

  A loop's body counts as often as it runs, and of a conditional the most expensive
  branch counts.

  Args:
    jaxpr: A jaxpr, open or closed.
    loop_rounds: Iterations of `while` loops, whose trip count is not fixed.
    expert_shards: Devices that share the experts of a mixture. Each has room for all
      rows of a grouped product but computes, on average, its share of them.

  Returns:
    The number of operations.
  """
  inner = getattr(jaxpr, 'jaxpr', jaxpr)
  return sum(_equation_flops(eqn, loop_rounds, expert_shards) for eqn in inner.eqns)


def _equation_flops(eqn: Any, loop_rounds: int, expert_shards: int) -> float:
  name, params = eqn.primitive.name, eqn.params
  if name == 'dot_general':
    (contracted, _), _ = params['dimension_numbers']
    lhs = eqn.invars[0].aval.shape
    return 2.0 * eqn.outvars[0].aval.size * math.prod(lhs[i] for i in contracted)
  if name.startswith('ragged_dot'):
    return _grouped_flops(eqn) / expert_shards
  if name.startswith('dot_product_attention'):  # cuDNN's, which is opaque
    return _attention_flops(eqn, backward='bwd' in name)
  if name == 'pallas_call':
    return _kernel_flops(params)
  if params.get('name') in GROUPED_MATMULS:
    shapes = sorted((x.aval.shape for x in eqn.invars if x.aval.ndim > 1), key=len)
    if len(shapes) == 2:  # rematerialization splits off a part that multiplies nothing
      return 2.0 * math.prod(shapes[0]) * shapes[1][-1] / expert_shards
  if name == 'cond':
    return max(
      count_flops(branch, loop_rounds, expert_shards) for branch in params['branches']
    )
  if name == 'shard_map':
    expert_shards = dict(params['mesh'].shape).get('expert', 1)
  inner = sum(
    count_flops(jaxpr, loop_rounds, expert_shards) for jaxpr in _inner_jaxprs(params)
  )
  if name == 'while':
    return loop_rounds * inner
  if name == 'scan':
    return params['length'] * inner
  if name == 'shard_map':
    mesh, axes = params['mesh'], params.get('manual_axes')
    sizes = dict(mesh.shape)
    return math.prod(sizes[axis] for axis in axes or sizes) * inner
  return inner


def _attention_flops(eqn: Any, *, backward: bool) -> float:
  """Counts attention of queries `[B, T, H, d]` and keys `[B, T, K, d]`."""
  query, key = eqn.invars[0].aval, eqn.invars[1].aval
  products = 5 if backward else 2  # of scores and of values, and their gradients
  return 2.0 * products * query.size * key.shape[1]


def _grouped_flops(eqn: Any) -> float:
  """Counts a grouped product, in which each row meets the matrix of its group alone."""
  dims = eqn.params['ragged_dot_dimension_numbers']
  (contracted, _), _ = dims.dot_dimension_numbers
  lhs, output_size = eqn.invars[0].aval.shape, eqn.outvars[0].aval.size
  contracted_size = math.prod(lhs[i] for i in contracted)
  if set(dims.lhs_ragged_dimensions) <= set(contracted):
    output_size //= eqn.invars[2].aval.shape[
      -1
    ]  # a result a group, each of its rows alone
  return 2.0 * output_size * contracted_size


def _kernel_flops(params: dict[str, Any]) -> float:
  """Returns a Pallas kernel's own estimate, or counts its body at every grid point."""
  cost_estimate = params.get('cost_estimate')
  if cost_estimate is not None and cost_estimate.flops:
    return float(cost_estimate.flops)
  grid = [n for n in params['grid_mapping'].grid if isinstance(n, int)]
  return math.prod(grid) * count_flops(params['jaxpr'])


def _inner_jaxprs(params: dict[str, Any]) -> Iterator[Any]:
  for value in params.values():
    for item in value if isinstance(value, tuple | list) else (value,):
      if hasattr(getattr(item, 'jaxpr', item), 'eqns'):
        yield item
