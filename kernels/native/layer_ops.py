"""RMS norms and gated activations of a layer on a CPU, as `layer_ops.c` computes them.

Each is one pass over its arrays, forward and backward. Nothing but the arguments is
kept for the backward pass. In decoding, a row's bits do not depend on other rows.
"""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from kernels.dispatch import REFERENCE, choose, only_on, platform_of
from kernels.native import library

NORM, GATE = 'jaxrl_norm', 'jaxrl_gate'  # targets; those of gradients end in '_back'
CHUNK_FLOATS = 2**14  # as in layer_ops.c


def obstacle(platform: str | None, dtype: str, *, kernels: str = 'auto') -> str:
  """Returns why the kernels cannot be used; '' if they can, which is logged.

  Args:
    platform: The platform to compile for; None for this process's own.
    dtype: The dtype of activations.
    kernels: As in `kernels.dispatch`.
  """
  platform = platform_of(platform)
  able = only_on('cpu', rms_norm, platform=platform)
  if not isinstance(able, str) and kernels != REFERENCE:
    able = f'takes float32, not {dtype}' if dtype != 'float32' else library.obstacle()
    able = able or rms_norm
  candidates = {'native': able, REFERENCE: rms_norm}
  name = choose('norms and activations', candidates, platform=platform, option=kernels)
  if name == 'native':
    return ''
  return able if isinstance(able, str) else 'not asked for'


@jax.custom_vjp
def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
  """Computes scale · x / √(mean x² + ε) over the last axes.

  Args:
    x: `[..., *D]` float32.
    scale: `[*D]` float32.
    epsilon: ε; it has no gradient.

  Returns:
    `[..., *D]` float32.
  """
  return _rms_norm_forward(x, scale, epsilon)[0]


def _rms_norm_forward(x: jax.Array, scale: jax.Array, epsilon: float):
  rows = x.reshape(-1, scale.size)
  arrays = rows, scale.reshape(-1), jnp.float32(epsilon)
  (y,) = _call(NORM, arrays, [rows.shape])
  return y.reshape(x.shape), (x, scale, epsilon)


def _rms_norm_backward(kept: tuple[jax.Array, jax.Array, float], of_y: jax.Array):
  x, scale, epsilon = kept
  rows = x.reshape(-1, scale.size)
  num_sums = -(-len(rows) // (CHUNK_FLOATS // (scale.size + 1) + 1))
  arrays = rows, scale.reshape(-1), jnp.float32(epsilon), of_y.reshape(rows.shape)
  shapes = [rows.shape, (num_sums, scale.size)]
  of_x, sums = _call(NORM + '_back', arrays, shapes, {3: 0})
  return of_x.reshape(x.shape), sums.sum(0).reshape(scale.shape), None


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def gated(gate: jax.Array, up: jax.Array, activation: str) -> jax.Array:
  """Computes f(gate) · up.

  Args:
    gate: `[..., W]` float32.
    up: `[..., W]` float32.
    activation: f, 'silu' or 'gelu_tanh'.

  Returns:
    `[..., W]` float32.
  """
  return _gated_forward(gate, up, activation)[0]


def _gated_forward(gate: jax.Array, up: jax.Array, activation: str):
  rows = [x.reshape(-1, x.shape[-1]) for x in (gate, up)]
  (inner,) = _call(f'{GATE}_{activation}', rows, [rows[0].shape])
  return inner.reshape(gate.shape), (gate, up)


def _gated_backward(
  activation: str, kept: tuple[jax.Array, jax.Array], of_inner: jax.Array
):
  of_gate, of_up, _ = _gradients(*kept, of_inner, activation)
  return of_gate, of_up


gated.defvjp(_gated_forward, _gated_backward)


def gated_joined(both: jax.Array, activation: str) -> jax.Array:
  """Computes `gated` of both arrays in one; there is no gradient.

  Args:
    both: gate and up side by side, `[..., 2·W]` float32.
    activation: As for `gated`.

  Returns:
    `[..., W]` float32.
  """
  rows, width = both.reshape(-1, both.shape[-1]), both.shape[-1] // 2
  (inner,) = _call(f'{GATE}_{activation}', [rows], [(len(rows), width)])
  return inner.reshape(*both.shape[:-1], width)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def gated_product(
  gate: jax.Array, up: jax.Array, matrix: jax.Array, activation: str
) -> jax.Array:
  """Computes (f(gate) · up) · matrix, and keeps no f(gate) · up for the backward pass.

  Args:
    gate: As for `gated`.
    up: As for `gated`.
    matrix: `[W, D]` float32.
    activation: As for `gated`.

  Returns:
    `[..., D]` float32.
  """
  return _product_forward(gate, up, matrix, activation)[0]


def _product_forward(
  gate: jax.Array, up: jax.Array, matrix: jax.Array, activation: str
):
  inner, _ = _gated_forward(gate, up, activation)
  y = inner.reshape(-1, inner.shape[-1]) @ matrix
  return y.reshape(*inner.shape[:-1], -1), (gate, up, matrix)


def _product_backward(
  activation: str, kept: tuple[jax.Array, jax.Array, jax.Array], of_y: jax.Array
):
  gate, up, matrix = kept
  of_y = of_y.reshape(-1, of_y.shape[-1])
  of_inner = (of_y @ matrix.T).reshape(gate.shape)
  of_gate, of_up, inner = _gradients(gate, up, of_inner, activation)
  return of_gate, of_up, inner.reshape(-1, inner.shape[-1]).T @ of_y


gated_product.defvjp(_product_forward, _product_backward)


def _gradients(
  gate: jax.Array, up: jax.Array, of_inner: jax.Array, activation: str
) -> list[jax.Array]:
  """Returns the gradients of gate and up, and once more what `gated` computes."""
  rows = [x.reshape(-1, x.shape[-1]) for x in (gate, up, of_inner)]
  target, shapes = f'{GATE}_{activation}_back', [rows[0].shape] * 3
  found = _call(target, rows, shapes, {0: 0, 1: 1, 2: 2})
  return [x.reshape(gate.shape) for x in found]


def _call(
  target: str,
  arrays: Sequence[jax.Array],
  shapes: Sequence[tuple[int, ...]],
  aliases: Mapping[int, int] | None = None,
) -> Sequence[jax.Array]:
  """Calls a target, whose results are float32 of some shapes.

  Args:
    target: The target.
    arrays: Its arguments.
    shapes: The shapes of the results.
    aliases: Which results may lie in the place of which arguments.
  """
  library.widths()
  call = jax.ffi.ffi_call(
    target,
    [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
    input_output_aliases=dict(aliases or {}),
    vmap_method='sequential',
  )
  return call(*arrays)
