"""The row product multiplies few rows by a matrix, as each step of decoding does.

On a CPU, `row_product.c` reads the matrix in panels: [N / P, D, P], where P is three
vectors of the processor, or [N / P, D / 2, P, 2] in bfloat16. Where it cannot be
compiled, `obstacle` says so, and the caller multiplies plain matrices.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from kernels.dispatch import REFERENCE, choose, only_on, platform_of
from kernels.native import library

TARGET = 'jaxrl_row_product'
DTYPES = ('float32', 'bfloat16')


@functools.partial(
  jax.tree_util.register_dataclass, data_fields=['panels'], meta_fields=['shape']
)
@dataclasses.dataclass(frozen=True)
class PanelMatrix:
  """A matrix `[D, N]` in panels.

  Attributes:
    panels: `[N / P, D, P]` float32 or `[N / P, D / 2, P, 2]` bfloat16, both rounded up.
    shape: (D, N).
  """

  panels: jax.Array
  shape: tuple[int, int]

  def unpack(self) -> jax.Array:
    """Returns the matrix `[D, N]`."""
    panels, (inputs, columns) = self.panels, self.shape
    if panels.ndim == 4:
      panels = panels.swapaxes(2, 3).reshape(len(panels), -1, panels.shape[2])
    return panels.swapaxes(0, 1).reshape(panels.shape[1], -1)[:inputs, :columns]

  def columns(self, ids: jax.Array) -> jax.Array:
    """Returns columns of the matrix, as a table of embeddings is read.

    Args:
      ids: `[...]` int32, at least 0 and less than N.

    Returns:
      `[..., D]` in the type of the matrix.
    """
    width = self.panels.shape[2]
    found = self.panels[ids // width, :, ids % width]
    return found.reshape(*ids.shape, -1)[..., : self.shape[0]]


def obstacle(platform: str | None, *, kernels: str = 'auto') -> str:
  """Returns why the kernel cannot be used; '' if it can, which is logged.

  Args:
    platform: The platform to compile for; None for this process's own.
    kernels: As in `kernels.dispatch`.
  """
  platform = platform_of(platform)
  able = only_on('cpu', multiply, platform=platform)
  if not isinstance(able, str) and kernels != REFERENCE:
    able = library.obstacle() or able
  candidates = {'panels': able, REFERENCE: reference}
  if choose('row product', candidates, platform=platform, option=kernels) == 'panels':
    return ''
  return able if isinstance(able, str) else 'not asked for'


def pack(matrix: jax.Array) -> PanelMatrix:
  """Lays a matrix out in panels.

  Args:
    matrix: `[D, N]` float32 or bfloat16.

  Raises:
    OSError: If the kernel cannot be compiled or loaded here.
    TypeError: If the matrix has another type.
  """
  if matrix.dtype.name not in DTYPES:
    raise TypeError(f'panels are in {" or ".join(DTYPES)}, not {matrix.dtype}')
  (inputs, columns), width = matrix.shape, library.widths().panel_columns
  pairs = 2 if matrix.dtype == jnp.bfloat16 else 1
  padding = (0, -inputs % pairs), (0, -columns % width)
  steps = jnp.pad(matrix, padding).reshape(-(-inputs // pairs), pairs, -1, width)
  panels = steps.transpose(2, 0, 3, 1)
  panels = panels if pairs == 2 else panels[..., 0]
  return PanelMatrix(panels, (inputs, columns))


def multiply(x: jax.Array, matrix: PanelMatrix) -> jax.Array:
  """Multiplies rows by a matrix in panels, on a CPU.

  A row's bits depend neither on the other rows nor on the number of threads. There is
  no gradient.

  Args:
    x: `[..., D]`, rounded to the matrix's type.
    matrix: The matrix.

  Returns:
    `[..., N]` float32.

  Raises:
    OSError: If the kernel cannot be compiled or loaded here.
  """
  library.widths()
  inputs, columns = matrix.shape
  rows = x.reshape(-1, inputs).astype(matrix.panels.dtype)
  if matrix.panels.ndim == 4:
    rows = jnp.pad(rows, ((0, 0), (0, inputs % 2)))
  out = jax.ShapeDtypeStruct((len(rows), columns), jnp.float32)
  y = jax.ffi.ffi_call(TARGET, out)(rows, matrix.panels)
  return y.reshape(*x.shape[:-1], columns)


def reference(x: jax.Array, matrix: PanelMatrix) -> jax.Array:
  """Computes what `multiply` does, in plain jnp.

  Args:
    x: `[..., D]`.
    matrix: The matrix.
  """
  plain = matrix.unpack()
  x = x.astype(plain.dtype).astype(jnp.float32)
  return jnp.matmul(x, plain.astype(jnp.float32), precision='highest')
