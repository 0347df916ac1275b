"""Floating-point operations of a traced program: those of its matrix products."""

import math
from collections.abc import Iterator
from typing import Any


def of(jaxpr: Any) -> float:
  """Multiplications and additions, of all devices together; a loop's as often as run.

  Of a `while` whose rounds are not fixed one round counts; of branches the dearest.
  """
  inner = getattr(jaxpr, 'jaxpr', jaxpr)
  return sum(_equation(eqn) for eqn in inner.eqns)


def _equation(eqn: Any) -> float:
  name, params = eqn.primitive.name, eqn.params
  if name == 'dot_general':
    (contracted, _), _ = params['dimension_numbers']
    lhs = eqn.invars[0].aval.shape
    return 2.0 * eqn.outvars[0].aval.size * math.prod(lhs[i] for i in contracted)
  if name.startswith('ragged_dot'):
    return 2.0 * eqn.outvars[0].aval.size * eqn.invars[0].aval.shape[-1]
  if name.startswith('dot_product_attention'):  # cuDNN's, whose insides are not told
    query, key = eqn.invars[0].aval, eqn.invars[1].aval
    products = 5 if 'bwd' in name else 2  # of scores and of values, and their gradients
    return 2.0 * products * query.size * key.shape[1]
  if name == 'pallas_call':
    return _kernel(params)
  if name == 'cond':
    return max(of(branch) for branch in params['branches'])
  inner = sum(of(found) for found in _jaxprs(params))
  if name == 'scan':
    return params['length'] * inner
  if name == 'shard_map':
    mesh, axes = params['mesh'], params.get('manual_axes')
    sizes = dict(mesh.shape)
    return math.prod(sizes[axis] for axis in axes or sizes) * inner
  return inner


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
