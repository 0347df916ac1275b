"""Eight-bit weights keep the matrices of layers as `kernels.block_rounding` has them.

In the parameter tree, 'codes' `[…, inputs, outputs]` and 'scales' `[…, blocks,
outputs]` then stand in the place of a 'kernel'. They are decoded where a layer reads
them. The matrices of attention, of MLPs and of experts are rounded. Embeddings, the LM
head, norms, biases, routers, gates of shared experts, DeltaNets and vision towers keep
their type.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.types import AnyArray, Params, PyTree
from kernels import block_rounding
from kernels.block_rounding import BlockFormat

# Names of matrices by the module in which they lie, with the number of input axes.
_MLP = dict.fromkeys(('gate', 'up', 'down'), 1)
MATRICES = {
  'attention': {
    **dict.fromkeys(('q', 'k', 'v', 'output_gate', 'q_a', 'q_b', 'kv_a', 'kv_b'), 1),
    'o': 2,
  },
  'mlp': _MLP,
  'shared': _MLP,
  'dense': _MLP,
  'experts': _MLP,
}
CODES, SCALES = 'codes', 'scales'
_BITS = jnp.uint8  # in which float8 is sent: whoever casts floats leaves it as it is


def rounded(weights: Params, form: BlockFormat) -> Params:
  """Rounds the matrices of one layer; gradients pass as if they were not rounded.

  Args:
    weights: The layer's parameters.
    form: The format.
  """

  def change(one: Params, inputs: int, lead: int) -> Params:
    kernel = one['kernel']
    matrix = block_rounding.rounded(_as_matrix(kernel, inputs, lead), form)
    return one | {'kernel': matrix.reshape(kernel.shape)}

  return _change(weights, 'kernel', change)


def encode(params: Params, form: BlockFormat) -> Params:
  """Rounds the matrices of a model's layers, for the engine that multiplies by them.

  Args:
    params: Parameters without adapters, stacked or as a tuple of layers. What `to_send`
      has rounded stays so.
    form: The format.

  Returns:
    The parameters with codes and scales.
  """
  if isinstance(params['layers'], tuple):
    layers: Any = tuple(encode_layer(layer, form) for layer in params['layers'])
  else:
    layers = _encode(params['layers'], form, 1)
  return params | {'layers': layers}


def encode_layer(weights: Params, form: BlockFormat) -> Params:
  """Does what `encode` does, for one layer."""
  return _encode(weights, form, 0)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _encode(weights: Params, form: BlockFormat, stacked: int) -> Params:
  def change(one: Params, inputs: int, lead: int) -> Params:
    matrix = _as_matrix(one['kernel'], inputs, lead + stacked)
    codes, scales = block_rounding.encode(matrix, form)
    rest = {name: x for name, x in one.items() if name != 'kernel'}
    return rest | {CODES: codes, SCALES: scales}

  def read_bits(one: Params, inputs: int, lead: int) -> Params:
    del inputs, lead
    if one[CODES].dtype != _BITS:
      return one
    return one | {CODES: jax.lax.bitcast_convert_type(one[CODES], jnp.float8_e4m3fn)}

  return _change(_change(weights, 'kernel', change), CODES, read_bits)


@functools.partial(jax.jit, static_argnums=1)
def to_send(params: Params, form: BlockFormat) -> Params:
  """Rounds the matrices of a model's layers, for a weight store.

  Args:
    params: Parameters without adapters, layers stacked.
    form: The format.

  Returns:
    The parameters with codes and scales. Codes are integers, float8's bits are uint8.
  """

  def write_bits(one: Params, inputs: int, lead: int) -> Params:
    del inputs, lead
    if one[CODES].dtype != jnp.float8_e4m3fn:
      return one
    return one | {CODES: jax.lax.bitcast_convert_type(one[CODES], _BITS)}

  encoded = encode(params, form)
  return encoded | {'layers': _change(encoded['layers'], CODES, write_bits)}


def decode(weights: Params, shapes: Params) -> Params:
  """Undoes `encode` for one layer, where nothing is computed that nobody reads.

  Args:
    weights: The layer's parameters.
    shapes: Their shapes before, by the same names; matrices that are not among them
      stay two-dimensional.

  Returns:
    The parameters with float32 kernels in the place of codes.
  """

  def walk(tree: Params, known: PyTree) -> Params:
    known = known if isinstance(known, dict) else {}
    if CODES not in tree:
      return {
        name: walk(x, known.get(name)) if isinstance(x, dict) else x
        for name, x in tree.items()
      }
    kernel = block_rounding.decode(tree[CODES], tree[SCALES])
    if 'kernel' in known:
      kernel = kernel.reshape(known['kernel'].shape)
    rest = {name: x for name, x in tree.items() if name not in (CODES, SCALES)}
    return rest | {'kernel': kernel}

  return walk(weights, shapes)


def parts(params: Params) -> list[Any]:
  """Returns all codes and scales of parameters.

  Args:
    params: From `encode` or `to_send`.
  """
  leaves = jax.tree_util.tree_leaves_with_path(params)
  return [x for path, x in leaves if getattr(path[-1], 'key', '') in (CODES, SCALES)]


def _as_matrix(kernel: AnyArray, inputs: int, lead: int) -> PyTree:
  """Reshapes `[*lead, *inputs, *outputs]` to `[*lead, inputs, outputs]`."""
  width = math.prod(kernel.shape[lead : lead + inputs])
  return kernel.reshape(*kernel.shape[:lead], width, -1)


def _change(
  tree: Params, what: str, change: Callable[[Params, int, int], Params], name: str = ''
) -> Params:
  """Replaces the modules that have `what` and are named in `MATRICES`.

  Args:
    tree: The parameters.
    what: The name of an array that the modules have.
    change: Makes the new module of `(module, input axes, axes before these)`.
    name: The name of the tree's own module; '' for the whole of the parameters.
  """
  known = MATRICES.get(name, {})
  changed = {}
  for own_name, value in tree.items():
    if isinstance(value, dict) and own_name in known and what in value:
      value = change(value, known[own_name], int(name == 'experts'))
    elif isinstance(value, dict):
      value = _change(value, what, change, own_name)
    changed[own_name] = value
  return changed
