"""The library of native kernels is compiled where it is used.

The first process that needs them compiles them for its processor, which takes a second
or two. Without a C compiler, `obstacle` says so, and callers do without.
"""

import ctypes
import functools
import pathlib
import platform
import threading

import jax

from kernels.native import compiler

TARGETS = ('jaxrl_row_product',)
FOLDER = pathlib.Path(__file__).parent
SOURCES = (FOLDER / 'row_product.c',)
HEADER = FOLDER / 'custom_call.h'

_LOCK = threading.Lock()


def obstacle() -> str:
  """Compiles and registers the kernels; returns why that is impossible, or ''."""
  with _LOCK:  # engines may load weights on several threads
    found = _registered()
  return found if isinstance(found, str) else ''


def panel_columns() -> int:
  """Returns the columns of a panel of `row_product`.

  Raises:
    OSError: If the kernels cannot be compiled or loaded here.
  """
  with _LOCK:
    found = _registered()
  if isinstance(found, str):
    raise OSError(found)
  return found


@functools.cache
def _registered() -> int | str:
  """Returns the columns of a panel, or why there are no kernels; tries only once."""
  try:
    return register('native')
  except OSError as error:
    return str(error)


def register(processor: str, suffix: str = '') -> int:
  """Makes the kernels targets of `jax.ffi.ffi_call`.

  Args:
    processor: The C compiler's name of the processor to compile for.
    suffix: What follows `TARGETS` in the names of the targets.

  Returns:
    The columns of a panel.

  Raises:
    OSError: If the kernels cannot be compiled or loaded.
  """
  library = ctypes.CDLL(str(_built(processor)))
  for target in TARGETS:
    function = jax.ffi.pycapsule(getattr(library, target))
    jax.ffi.register_ffi_target(target + suffix, function, platform='cpu')
  return ctypes.c_int.in_dll(library, 'jaxrl_panel_columns').value


def _built(processor: str) -> pathlib.Path:
  """Returns the compiled library; OSError says why there is none."""
  headers = pathlib.Path(jax.ffi.include_dir())
  option = '-march' if platform.machine() in ('x86_64', 'AMD64') else '-mcpu'
  return compiler.build(
    'kernels',
    SOURCES,
    options=('-O3', f'{option}={processor}', f'-I{headers}'),
    headers=(HEADER, headers / 'xla' / 'ffi' / 'api' / 'c_api.h'),
  )
