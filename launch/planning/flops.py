"""Floating-point operations of a traced program: those of its matrix products."""

import math
from collections.abc import Iterator
from typing import Any

# JAX's attention for GPU, whose loops end where the data say; of decode alike, by name.
LOOPS = ('mha_forward', 'mha_backward')
GROUPED = ('grouped_dot', 'grouped_outer')  # kernels of `kernels.grouped_gpu`


def of(jaxpr: Any, rounds: int = 1, experts: int = 1) -> float:
  """Multiplications and additions, of all devices together; a loop's as often as run.

  rounds: of a `while` where they are not fixed. Of branches the dearest counts.
  experts: devices that share out a mixture's: each has room for all rows of a grouped
  product, and on average as many as are left when they are shared out.
  """
  inner = getattr(jaxpr, 'jaxpr', jaxpr)
  return sum(_equation(eqn, rounds, experts) for eqn in inner.eqns)


def _equation(eqn: Any, rounds: int, experts: int) -> float:
  name, params = eqn.primitive.name, eqn.params
  if name == 'dot_general':
    (contracted, _), _ = params['dimension_numbers']
    lhs = eqn.invars[0].aval.shape
    return 2.0 * eqn.outvars[0].aval.size * math.prod(lhs[i] for i in contracted)
  if name.startswith('ragged_dot'):
    return _grouped(eqn) / experts
  if name.startswith('dot_product_attention'):  # cuDNN's, whose insides are not told
    return _attention(eqn, backward='bwd' in name)
  if name == 'pallas_call':
    own = str(params['name'])
    if own in LOOPS and eqn.invars[1].aval.ndim == 4:
      return _attention(eqn, backward=own == 'mha_backward')
    return _kernel(params) / (experts if own in GROUPED else 1)
  if name == 'cond':
    return max(of(branch, rounds, experts) for branch in params['branches'])
  if name == 'shard_map':
    experts = dict(params['mesh'].shape).get('expert', 1)
  inner = sum(of(found, rounds, experts) for found in _jaxprs(params))
  if name == 'while':
    return rounds * inner
  if name == 'scan':
    return params['length'] * inner
  if name == 'shard_map':
    mesh, axes = params['mesh'], params.get('manual_axes')
    sizes = dict(mesh.shape)
    return math.prod(sizes[axis] for axis in axes or sizes) * inner
  return inner


def _attention(eqn: Any, *, backward: bool) -> float:
  """Of queries `[B, T, H, d]` and keys `[B, T, K, d]`, the first two arguments."""
  query, key = eqn.invars[0].aval, eqn.invars[1].aval
  products = 5 if backward else 2  # of scores and of values, and their gradients
  return 2.0 * products * query.size * key.shape[1]


def _grouped(eqn: Any) -> float:
  """Each row meets the matrix of its group alone, in the weights' gradient too."""
  dims = eqn.params['ragged_dot_dimension_numbers']
  (contracted, _), _ = dims.dot_dimension_numbers
  lhs, found = eqn.invars[0].aval.shape, eqn.outvars[0].aval.size
  once = math.prod(lhs[i] for i in contracted)
  if set(dims.lhs_ragged_dimensions) <= set(contracted):
    found //= eqn.invars[2].aval.shape[-1]  # a result a group, each of its rows alone
  return 2.0 * found * once


def _kernel(params: dict[str, Any]) -> float:
  """What a Pallas kernel says it costs, or its body at every place of its grid."""
  said = params.get('cost_estimate')
  if said is not None and said.flops:
    return float(said.flops)
  grid = [n for n in params['grid_mapping'].grid if isinstance(n, int)]
  return math.prod(grid) * of(params['jaxpr'])


def _jaxprs(params: dict[str, Any]) -> Iterator[Any]:
  for value in params.values():
    for one in value if isinstance(value, tuple | list) else (value,):
      if hasattr(getattr(one, 'jaxpr', one), 'eqns'):
        yield one
