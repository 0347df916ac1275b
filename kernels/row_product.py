"""The row product multiplies few rows by a matrix, as each step of decoding does.

On a CPU, `row_product.c` reads the matrix in panels: [N / P, D, P], where P is three
vectors of the processor, or [N / P, D / 2, P, 2] in bfloat16. The first process that
needs it compiles it, which takes a second, and keeps it in the user's cache. Without a
C compiler, `obstacle` says so, and the caller multiplies plain matrices.
"""

import ctypes
import dataclasses
import functools
import hashlib
import logging
import os
import pathlib
import platform as machine
import shlex
import shutil
import subprocess
import tempfile
import threading

import jax
import jax.numpy as jnp

from kernels.dispatch import REFERENCE, choose, only_on, platform_of

TARGET = 'jaxrl_row_product'
SOURCE = pathlib.Path(__file__).with_suffix('.c')
COMPILERS = ('cc', 'gcc', 'clang')
COMPILE_TIMEOUT_S = 120.0
DTYPES = ('float32', 'bfloat16')

_LOCK = threading.Lock()
_log = logging.getLogger(__name__)


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
    try:
      _panel_columns()
    except OSError as error:
      able = str(error)
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
  (inputs, columns), width = matrix.shape, _panel_columns()
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
  _panel_columns()
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


def _panel_columns() -> int:
  """Returns the columns P of a panel; OSError says why there is no kernel."""
  with _LOCK:  # engines may load weights on several threads
    found = _registered()
  if isinstance(found, str):
    raise OSError(found)
  return found


@functools.cache
def _registered() -> int | str:
  """Compiles, loads and registers the kernel once, or says why that is impossible."""
  try:
    return register(TARGET, 'native')
  except OSError as error:
    return str(error)


def register(target: str, processor: str) -> int:
  """Makes the kernel a target of `jax.ffi.ffi_call`.

  Args:
    target: The target's name.
    processor: The C compiler's name of the processor to compile for.

  Returns:
    The columns P of a panel.

  Raises:
    OSError: If the kernel cannot be compiled or loaded.
  """
  library = ctypes.CDLL(str(_built(processor)))
  function = jax.ffi.pycapsule(getattr(library, TARGET))
  jax.ffi.register_ffi_target(target, function, platform='cpu')
  return ctypes.c_int.in_dll(library, 'jaxrl_panel_columns').value


def _built(processor: str) -> pathlib.Path:
  """Returns the compiled library; OSError says why there is none."""
  headers = pathlib.Path(jax.ffi.include_dir())
  option = '-march' if machine.machine() in ('x86_64', 'AMD64') else '-mcpu'
  flags = ['-std=gnu11', '-O3', f'{option}={processor}', '-shared', '-fPIC']
  command = [*_compiler(), *flags, f'-I{headers}']
  header = headers / 'xla' / 'ffi' / 'api' / 'c_api.h'
  parts = SOURCE.read_bytes(), header.read_bytes(), _processor(), str(command).encode()
  name = f'{SOURCE.stem}-{hashlib.sha256(b"".join(parts)).hexdigest()[:16]}.so'
  home = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
  cache = pathlib.Path(home) / 'jaxrl'
  if (cache / name).exists():
    return cache / name
  cache.mkdir(mode=0o700, parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=cache) as build:
    _compile(command, pathlib.Path(build) / name)
    os.replace(pathlib.Path(build) / name, cache / name)  # another may have done so
  return cache / name


def _compiler() -> list[str]:
  for command in (os.environ.get('CC', ''), *COMPILERS):
    name, *options = shlex.split(command) or ['']
    if found := shutil.which(name):
      return [found, *options]
  raise OSError('needs a C compiler (cc, gcc, clang or $CC), and finds none')


def _compile(command: list[str], library: pathlib.Path) -> None:
  _log.info('compiling %s for this processor', SOURCE.name)
  command = [*command, '-o', str(library), str(SOURCE)]
  try:
    done = subprocess.run(
      command,
      capture_output=True,
      text=True,
      errors='replace',
      timeout=COMPILE_TIMEOUT_S,
      check=False,
    )
  except subprocess.TimeoutExpired as error:
    raise OSError(f'took {command[0]} over {COMPILE_TIMEOUT_S:.0f} s') from error
  if done.returncode:
    raise OSError(f'is not compiled by {command[0]}: {done.stderr.strip()[-500:]}')


def _processor() -> bytes:
  """Returns what sets this processor's instructions apart from another's."""
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_bytes().splitlines()
    return next(x for x in lines if x.startswith((b'flags', b'Features')))
  except (OSError, StopIteration):
    return machine.processor().encode()
