"""Output-major matrices `[outputs, inputs]` in bfloat16 decode fastest on a CPU.

A decode step multiplies few rows by every matrix of the model, and so mostly waits for
memory, which reads bfloat16 in half of float32's time. XLA's CPU backend multiplies it
so only if rows are in bfloat16 too and sums in float32; otherwise it converts the
matrix at every token. It copies a matrix `[inputs, outputs]` into another order before
each product, too, and reads one `[outputs, inputs]` as it is.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models.decoding.joined_products import kernel_shape, replace_kernels
from jaxrl.models.model_config import ModelConfig
from jaxrl.types import Params

# The matrices by module, with the number of axes that are inputs.
MATRICES = {
  'attention': {'q': 1, 'k': 1, 'v': 1, 'o': 2},
  'mlp': {'gate': 1, 'up': 1, 'down': 1},
}
ROWS = 'rows'  # the name of an output-major kernel
MIN_ROWS = 2  # XLA multiplies a single row in another way, and bfloat16 slowly


def cast_tables(params: Params, dtype: str) -> Params:
  """Casts the embedding table and the LM head of a model, and leaves the layers.

  Args:
    params: The model's parameters.
    dtype: The type of the tables; '' leaves them, too.
  """
  if not dtype:
    return params
  tables = {
    name: params[name] | {'table': params[name]['table'].astype(dtype)}
    for name in ('embedding', 'lm_head')
    if name in params
  }
  return params | tables


def arrange_layer(weights: Params, dtype: str) -> Params:
  """Makes the matrices of attention and MLP output-major in a type.

  Args:
    weights: One layer's parameters.
    dtype: The type of the matrices.

  Returns:
    Parameters that `layer_stack.block` understands. Experts, adapters and norms are as
    before.
  """
  turn = lambda kernel: kernel.astype(dtype).T  # noqa: E731
  return replace_kernels(weights, MATRICES, ROWS, turn)


def part(
  config: ModelConfig, weights: Params
) -> tuple[Params, dict[tuple[str, str], Any]]:
  """Undoes `arrange_layer`.

  Args:
    config: The layer's shape.
    weights: The layer's parameters.

  Returns:
    The parameters as before, which cost nothing if nobody reads them, and by the names
    of module and matrix its product, `[N, inputs] -> [N, outputs]`.
  """
  products: dict[tuple[str, str], Any] = {}
  for module, names in MATRICES.items():
    parts = weights.get(module, {})
    restored = {}
    for name in names:
      one = parts.get(name)
      if not isinstance(one, dict) or ROWS not in one:
        continue
      rows = one[ROWS]
      rest = {kind: x for kind, x in one.items() if kind != ROWS}
      shape = kernel_shape(config, name, *rows.shape[::-1])
      restored[name] = rest | {'kernel': rows.T.reshape(shape)}
      products[module, name] = functools.partial(product, rows)
    if restored:
      weights = weights | {module: parts | restored}
  return weights, products


def product(rows: jax.Array, x: jax.Array) -> jax.Array:
  """Multiplies by an output-major matrix.

  Args:
    rows: The matrix `[outputs, inputs]`.
    x: `[..., inputs]`.

  Returns:
    `[..., outputs]` in the type of x; sums are in float32.
  """
  flat = x.reshape(-1, x.shape[-1])
  count = len(flat)
  if count < MIN_ROWS:
    flat = jnp.concatenate([flat] * MIN_ROWS)
  sides = ((1,), (1,)), ((), ())
  flat = flat.astype(rows.dtype)
  y = jax.lax.dot_general(flat, rows, sides, preferred_element_type=jnp.float32)
  return y[:count].astype(x.dtype).reshape(*x.shape[:-1], len(rows))
