"""Joined products compute what several matrices make of the same input at once.

On a GPU each product of a decode step is a kernel of its own, and so small that its
start takes as long as its work. The matrices of queries, keys and values are therefore
joined to one, and so are those of an MLP's gate and up. It happens once per weights
version, not per token. Matrices with adapters stay as they are.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models.model_config import ModelConfig
from jaxrl.types import Params

# Where in a layer's parameters they lie: the module, what is joined, and its new name.
JOINED = (('attention', ('q', 'k', 'v'), 'qkv'), ('mlp', ('gate', 'up'), 'gate_up'))
# What a matrix without adapters has, as a float or in 8 bits.
EIGHT_BITS = {'codes', 'scales'}
PLAIN = {'kernel'}, {'kernel', 'bias'}, EIGHT_BITS, EIGHT_BITS | {'bias'}


def join(params: Params) -> Params:
  """Replaces matrices that read the same input by one.

  Args:
    params: Parameters whose 'layers' is a tuple of single layers.

  Returns:
    Parameters that `layer_stack.block` understands.
  """
  return params | {'layers': tuple(map(_join_layer, params['layers']))}


def _join_layer(weights: Params) -> Params:
  for module, names, joined in JOINED:
    parts = weights.get(module, {})
    matrices = [parts[name] for name in names if name in parts]
    kinds = {frozenset(matrix) for matrix in matrices}
    if len(matrices) != len(names) or len(kinds) > 1 or not kinds <= _plain_kinds():
      continue
    one = {name: [_flat(name, x[name]) for x in matrices] for name in matrices[0]}
    rest = {name: x for name, x in parts.items() if name not in names}
    rest[joined] = {name: jnp.concatenate(x, axis=-1) for name, x in one.items()}
    weights = weights | {module: rest}
  return weights


def _plain_kinds() -> set[frozenset[str]]:
  return set(map(frozenset, PLAIN))


def _flat(name: str, x: jax.Array) -> jax.Array:
  """Joins the output axes of a bias `[*outputs]`, or of `[rows, *outputs]`."""
  return x.reshape(-1) if name == 'bias' else x.reshape(len(x), -1)


def part(config: ModelConfig, weights: Params) -> tuple[Params, dict[str, Any]]:
  """Undoes `join` for one layer.

  Args:
    config: The layer's shape.
    weights: The layer's parameters.

  Returns:
    The parameters as before, which cost nothing if nobody reads them, and by the name
    of the module the function from its input to the several outputs.
  """
  heads, kv_heads = (
    (number, config.head_dim) for number in (config.num_heads, config.num_kv_heads)
  )
  products = {}
  for module, names, joined in JOINED:
    if joined not in weights.get(module, {}):
      continue
    one = weights[module][joined]
    wide = ((one['kernel'].shape[1] // 2,),) * 2
    shapes = (heads, kv_heads, kv_heads) if module == 'attention' else wide
    ends, at = [], 0
    for shape in shapes[:-1]:
      at += math.prod(shape)
      ends.append(at)
    cut = {name: jnp.split(x, ends, axis=-1) for name, x in one.items()}
    split = {
      name: {
        kind: pieces[i].reshape(*pieces[i].shape[:-1], *shapes[i])
        for kind, pieces in cut.items()
      }
      for i, name in enumerate(names)
    }
    rest = {name: x for name, x in weights[module].items() if name != joined}
    weights = weights | {module: rest | split}
    products[module] = functools.partial(_product, one, shapes, tuple(ends))
  return weights, products


def _product(
  one: Params,
  shapes: tuple[tuple[int, ...], ...],
  ends: tuple[int, ...],
  x: jax.Array,
) -> list[jax.Array]:
  """Returns the outputs `[..., *shape]` of x `[..., D]`."""
  y = x.reshape(-1, x.shape[-1]) @ one['kernel'].astype(x.dtype)
  if 'bias' in one:
    y = y + one['bias'].astype(x.dtype)
  parts = jnp.split(y, ends, axis=-1)
  return [
    p.reshape(*x.shape[:-1], *shape) for p, shape in zip(parts, shapes, strict=True)
  ]
