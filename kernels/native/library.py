"""The library of native kernels is compiled where it is used.

The first process that needs them compiles them for its processor, which takes a second
or two, and keeps them in the user's cache. Without a C compiler, `obstacle` says so,
and callers do without.
"""

import ctypes
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

TARGETS = ('jaxrl_row_product',)
FOLDER = pathlib.Path(__file__).parent
SOURCES = (FOLDER / 'row_product.c',)
HEADER = FOLDER / 'custom_call.h'
COMPILERS = ('cc', 'gcc', 'clang')
COMPILE_TIMEOUT_S = 120.0

_LOCK = threading.Lock()
_log = logging.getLogger(__name__)


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
  option = '-march' if machine.machine() in ('x86_64', 'AMD64') else '-mcpu'
  flags = ['-std=gnu11', '-O3', f'{option}={processor}', '-shared', '-fPIC']
  command = [*_compiler(), *flags, f'-I{headers}']
  files = *SOURCES, HEADER, headers / 'xla' / 'ffi' / 'api' / 'c_api.h'
  parts = *(file.read_bytes() for file in files), _processor(), str(command).encode()
  name = f'kernels-{hashlib.sha256(b"".join(parts)).hexdigest()[:16]}.so'
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
    try:
      name, *options = shlex.split(command) or ['']
    except ValueError as error:
      raise OSError(f'needs a C compiler, and CC={command!r}: {error}') from error
    if found := shutil.which(name):
      return [found, *options]
  raise OSError('needs a C compiler (cc, gcc, clang or $CC), and finds none')


def _compile(command: list[str], library: pathlib.Path) -> None:
  _log.info('compiling kernels for this processor')
  command = [*command, '-o', str(library), *map(str, SOURCES)]
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
