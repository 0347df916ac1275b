"""Joined products compute what several matrices make of the same input at once.

Each product of a decode step is a kernel of its own, and so small that its start takes
as long as its work on a GPU. The matrices of queries, keys and values are therefore
joined to one, and so are those of an MLP's gate and up. On a CPU, they and the other
matrices lie in panels, which its kernel reads. All this happens once per weights
version, not per token. Matrices with adapters stay as they are.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models.model_config import ModelConfig
from jaxrl.types import Params, PyTree
from kernels.native import row_product
from kernels.native.row_product import PanelMatrix

# Where in a layer's parameters they lie: the module, what is joined, and its new name.
JOINED = (('attention', ('q', 'k', 'v'), 'qkv'), ('mlp', ('gate', 'up'), 'gate_up'))
# The matrices that lie in panels on a CPU, with the number of axes that are inputs.
MATRICES = {
  'attention': {'qkv': 1, 'q': 1, 'k': 1, 'v': 1, 'o': 2},
  'mlp': {'gate_up': 1, 'gate': 1, 'up': 1, 'down': 1},
}
PANELS = 'panels'  # the name of a kernel in panels
# What a matrix without adapters has, as a float or in 8 bits.
FLOATS, EIGHT_BITS = {'kernel', 'bias'}, {'codes', 'scales'}
PLAIN = {'kernel'}, FLOATS, EIGHT_BITS, EIGHT_BITS | {'bias'}


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


def pack_ends(params: Params, dtype: str, old: Params) -> Params:
  """Lays the LM head out in panels, and casts an embedding table beside it.

  Args:
    params: The parameters of a model; layers are as before.
    dtype: The type of both: 'float32' or 'bfloat16'.
    old: Panels of earlier parameters by the same names, which nobody needs any more.
      The new ones take their places in memory.

  Returns:
    Parameters that `layer_stack` understands.

  Raises:
    OSError: If `row_product.obstacle` says that there are no panels here.
  """
  ends = {name: params[name] for name in ('embedding', 'lm_head') if name in params}
  head = 'lm_head' if 'lm_head' in params else 'embedding'
  for name, one in ends.items():
    if one.keys() != {'table'}:
      continue
    table = one['table']
    if name == head:
      ends[name] = {PANELS: _pack_table(table, old.get(name, []), dtype)}
    else:
      ends[name] = {'table': table.astype(dtype)}
  return params | ends


@functools.partial(jax.jit, static_argnums=2, donate_argnums=1, keep_unused=True)
def _pack_table(table: jax.Array, spent: list[jax.Array], dtype: str) -> PanelMatrix:
  del spent  # the result lies there
  return row_product.pack(table.astype(dtype).T)


def pack_layer(weights: Params, dtype: str) -> Params:
  """Joins the matrices of a layer, and lays them and the others out in panels.

  Args:
    weights: One layer's parameters.
    dtype: The type of the matrices, as of `pack_ends`, which also raises the same.

  Returns:
    Parameters that `layer_stack.block` understands. Experts, adapters and norms are as
    before.
  """
  pack = lambda kernel: row_product.pack(kernel.astype(dtype))  # noqa: E731
  return replace_kernels(_join_layer(weights), MATRICES, PANELS, pack)


def panels(weights: PyTree) -> list[jax.Array]:
  """Returns the arrays of all matrices in panels, among any parameters."""
  is_packed = lambda x: isinstance(x, PanelMatrix)  # noqa: E731
  matrices = filter(is_packed, jax.tree.leaves(weights, is_leaf=is_packed))
  return [matrix.panels for matrix in matrices]


def replace_kernels(
  weights: Params,
  matrices: Mapping[str, Mapping[str, int]],
  new_name: str,
  change: Callable[[jax.Array], PyTree],
) -> Params:
  """Replaces the kernels of matrices without adapters.

  Args:
    weights: One layer's parameters.
    matrices: The matrices by module, with the number of axes that are inputs.
    new_name: What takes the name of 'kernel'.
    change: Makes that of a kernel `[inputs, outputs]`.
  """
  for module, names in matrices.items():
    parts = weights.get(module, {})
    changed = {}
    for name, inputs in names.items():
      one = parts.get(name)
      if not isinstance(one, dict) or not {'kernel'} <= one.keys() <= FLOATS:
        continue
      kernel = one['kernel']
      kernel = kernel.reshape(math.prod(kernel.shape[:inputs]), -1)
      rest = {kind: x for kind, x in one.items() if kind != 'kernel'}
      changed[name] = rest | {new_name: change(kernel)}
    if changed:
      weights = weights | {module: parts | changed}
  return weights


def unpack(
  config: ModelConfig, weights: Params
) -> tuple[Params, dict[tuple[str, str], Any]]:
  """Undoes the panels of `pack_layer`.

  Args:
    config: The layer's shape.
    weights: The layer's parameters.

  Returns:
    Parameters as of `join`, which cost nothing if nobody reads their kernels, and by
    the names of module and matrix its product, `[N, inputs] -> [N, outputs]`.
  """
  products: dict[tuple[str, str], Any] = {}
  for module, names in MATRICES.items():
    parts = dict(weights.get(module, {}))
    for name in names:
      one = parts.get(name)
      if not isinstance(one, dict) or PANELS not in one:
        continue
      matrix = one[PANELS]
      rest = {kind: x for kind, x in one.items() if kind != PANELS}
      kernel = matrix.unpack()
      parts[name] = rest | {
        'kernel': kernel.reshape(kernel_shape(config, name, *matrix.shape))
      }
      products[module, name] = functools.partial(_multiply, matrix)
    if parts:
      weights = weights | {module: parts}
  return weights, products


def kernel_shape(
  config: ModelConfig, name: str, inputs: int, outputs: int
) -> tuple[int, ...]:
  """Returns the shape that a matrix has as the kernel of its module.

  Args:
    config: The layer's shape.
    name: The matrix, one of `MATRICES`.
    inputs: Its inputs, of all axes together.
    outputs: Its outputs, of all axes together.
  """
  if name == 'o':
    return config.num_heads, inputs // config.num_heads, outputs
  if name not in ('q', 'k', 'v'):
    return inputs, outputs
  heads = config.num_heads if name == 'q' else config.num_kv_heads
  return inputs, heads, outputs // heads


def _multiply(matrix: PanelMatrix, x: jax.Array) -> jax.Array:
  return row_product.multiply(x, matrix).astype(x.dtype)


def _plain_kinds() -> set[frozenset[str]]:
  return set(map(frozenset, PLAIN))


def _flat(name: str, x: jax.Array) -> jax.Array:
  """Joins the output axes of a bias `[*outputs]`, or of `[rows, *outputs]`."""
  return x.reshape(-1) if name == 'bias' else x.reshape(len(x), -1)


def part(
  config: ModelConfig, weights: Params, own: Mapping[tuple[str, str], Any]
) -> tuple[Params, dict[str, Any]]:
  """Undoes `join` for one layer.

  Args:
    config: The layer's shape.
    weights: The layer's parameters.
    own: The products of joined matrices that `unpack` has returned.

  Returns:
    The parameters as before, which cost nothing if nobody reads them, and by the name
    of the module the function from its input to the outputs: those of queries, keys and
    values, or one array with those of gate and up.
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
    product = own.get((module, joined))
    if module == 'mlp':  # which takes its outputs as they are
      shapes, ends = ((one['kernel'].shape[1],),), []
    products[module] = functools.partial(_product, one, product, shapes, tuple(ends))
  return weights, products


def _product(
  one: Params,
  product: Callable[[jax.Array], jax.Array] | None,
  shapes: tuple[tuple[int, ...], ...],
  ends: tuple[int, ...],
  x: jax.Array,
) -> list[jax.Array]:
  """Returns the outputs `[..., *shape]` of x `[..., D]`."""
  rows = x.reshape(-1, x.shape[-1])
  y = product(rows) if product else rows @ one['kernel'].astype(x.dtype)
  if 'bias' in one:
    y = y + one['bias'].astype(x.dtype)
  parts = jnp.split(y, ends, axis=-1)
  return [
    p.reshape(*x.shape[:-1], *shape) for p, shape in zip(parts, shapes, strict=True)
  ]
