"""Compiles C sources to a library, which the user's cache keeps."""

import hashlib
import logging
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence

COMPILERS = ('cc', 'gcc', 'clang')
OPTIONS = ('-std=gnu11', '-shared', '-fPIC')
COMPILE_TIMEOUT_S = 120.0

_log = logging.getLogger(__name__)


def build(
  name: str,
  sources: Sequence[pathlib.Path],
  *,
  options: Sequence[str] = (),
  headers: Sequence[pathlib.Path] = (),
) -> pathlib.Path:
  """Compiles a library, unless the cache has it.

  Args:
    name: The beginning of the file's name.
    sources: The C sources.
    options: Further options of the compiler.
    headers: The headers that the sources include. A change of any file, of the options
      or of the processor makes another library.

  Returns:
    The library.

  Raises:
    OSError: There is no compiler, it fails, or the cache cannot be written.
  """
  command = [*_compiler(), *OPTIONS, *options]
  parts = *(file.read_bytes() for file in (*sources, *headers)), _processor()
  digest = hashlib.sha256(b''.join((*parts, str(command).encode()))).hexdigest()[:16]
  home = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
  cache = pathlib.Path(home) / 'jaxrl'
  library = cache / f'{name}-{digest}.so'
  if library.exists():
    return library
  cache.mkdir(mode=0o700, parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=cache) as folder:
    _compile([*command, *map(str, sources)], pathlib.Path(folder) / library.name)
    os.replace(pathlib.Path(folder) / library.name, library)  # another may have done so
  return library


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
  _log.info('compiling %s for this processor', library.name)
  try:
    done = subprocess.run(
      [*command, '-o', str(library)],
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
    return platform.machine().encode() + platform.processor().encode()
