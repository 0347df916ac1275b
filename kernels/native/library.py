"""The library of native kernels is compiled where it is used.

The first process that needs them compiles them for its processor, which takes a second
or two. Without a C compiler, `obstacle` says so, and callers do without.
"""

import ctypes
import functools
import pathlib
import platform
import threading
from typing import NamedTuple

import jax

from kernels.native import compiler

TARGETS = (
  *('jaxrl_row_product', 'jaxrl_chunk_attention', 'jaxrl_keep_softmax'),
  *('jaxrl_attention', 'jaxrl_attention_back'),
  *('jaxrl_norm', 'jaxrl_norm_back'),
  *('jaxrl_gate_silu', 'jaxrl_gate_silu_back'),
  *('jaxrl_gate_gelu_tanh', 'jaxrl_gate_gelu_tanh_back'),
)
FOLDER = pathlib.Path(__file__).parent
FILES = (
  'row_product',
  'chunk_attention',
  'segment_attention',
  'row_softmax',
  'layer_ops',
)
SOURCES = tuple(FOLDER / f'{name}.c' for name in FILES)
HEADER = FOLDER / 'custom_call.h'

_LOCK = threading.Lock()


def obstacle() -> str:
  """Compiles and registers the kernels; returns why that is impossible, or ''."""
  with _LOCK:  # engines may load weights on several threads
    found = _registered()
  return found if isinstance(found, str) else ''


class Widths(NamedTuple):
  """What a kernel computes at once on this processor.

  Attributes:
    lanes: Floats of a vector.
    panel_columns: Columns of a panel of `row_product`.
  """

  lanes: int
  panel_columns: int


def widths() -> Widths:
  """Compiles and registers the kernels, and returns their widths.

  Raises:
    OSError: If the kernels cannot be compiled or loaded here.
  """
  with _LOCK:
    found = _registered()
  if isinstance(found, str):
    raise OSError(found)
  return found


@functools.cache
def _registered() -> Widths | str:
  """Returns the widths, or why there are no kernels; tries only once."""
  try:
    return register('native')
  except OSError as error:
    return str(error)


def register(processor: str, suffix: str = '') -> Widths:
  """Makes the kernels targets of `jax.ffi.ffi_call`.

  Args:
    processor: The C compiler's name of the processor to compile for.
    suffix: What follows `TARGETS` in the names of the targets.

  Returns:
    Their widths.

  Raises:
    OSError: If the kernels cannot be compiled or loaded.
  """
  library = ctypes.CDLL(str(_built(processor)))
  for target in TARGETS:
    function = jax.ffi.pycapsule(getattr(library, target))
    jax.ffi.register_ffi_target(target + suffix, function, platform='cpu')
  names = (f'jaxrl_{name}' for name in Widths._fields)
  return Widths(*(ctypes.c_int.in_dll(library, name).value for name in names))


def _built(processor: str) -> pathlib.Path:
  """Returns the compiled library; OSError says why there is none."""
  headers = pathlib.Path(jax.ffi.include_dir())
  option = '-march' if platform.machine() in ('x86_64', 'AMD64') else '-mcpu'
  return compiler.build(
    'kernels',
    SOURCES,
    options=('-O3', '-fno-math-errno', f'{option}={processor}', f'-I{headers}'),
    headers=(HEADER, headers / 'xla' / 'ffi' / 'api' / 'c_api.h'),
  )
