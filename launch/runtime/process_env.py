"""The process environment is tuned before anything heavy is imported.

A step takes large blocks of memory and frees them. A library that is loaded before libc
keeps them for the next step; without a C compiler, glibc's malloc is told to keep those
that are not too large. Both are read when a process starts, so the launcher executes
itself again with them. JAX's compilation cache keeps compiled programs between runs.
JAXRL_TUNE=0 turns all of it off; a variable that is already set is left as it is.
"""

import contextlib
import hashlib
import os
import pathlib
import platform
import re
import sys
from collections.abc import Iterator, Mapping, MutableMapping

from launch.runtime import host_memory

# The share of the machine's memory that may be idle in blocks. Without the library, the
# largest block in glibc's heap, which may hold several times as many as are in use,
# because small ones take a part of a freed one. Older versions keep 32 MiB at most.
IDLE_SHARE, MOST_IDLE = 1 / 8, 4 << 30
HEAP_SHARE, NEW_VERSION = 1 / 64, (2, 36)
SMALLEST = 32 << 20  # as in kept_blocks.c
THRESHOLD = 'MALLOC_MMAP_THRESHOLD_'
MALLOC = {
  'MALLOC_TRIM_THRESHOLD_': str(16 << 30),
  'MALLOC_TOP_PAD_': str(64 << 20),
  'MALLOC_ARENA_MAX': '1',
}
CACHE = {
  'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
  'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '0',
}
CACHE_DIR = 'JAX_COMPILATION_CACHE_DIR'
REEXEC_FLAG = 'JAXRL_TUNED'  # the id of a process that has executed itself again
PRELOAD, LIBRARY = 'LD_PRELOAD', 'JAXRL_LARGE_BLOCKS'
OBSTACLE = 'JAXRL_NO_LARGE_BLOCKS'  # why there is no library


def cache_dir(env: Mapping[str, str]) -> pathlib.Path:
  """Returns this user's compilation cache.

  Programs contain instructions of the processor, so each model has its own folder.
  """
  home = env.get('XDG_CACHE_HOME') or os.path.join(os.path.expanduser('~'), '.cache')
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
    model = [line for line in lines if line.startswith(('flags', 'Features'))][:1]
  except OSError:
    model = [platform.processor()]
  cpu_hash = hashlib.sha256(f'{platform.machine()}{model}'.encode()).hexdigest()[:8]
  return pathlib.Path(home) / 'jaxrl' / f'xla-{cpu_hash}'


def missing_variables(env: Mapping[str, str]) -> dict[str, str]:
  """Returns the variables that tuning would add to `env`."""
  if env.get('JAXRL_TUNE') == '0':
    return {}
  name, version = platform.libc_ver()
  wanted = _malloc_variables(env, version) if name == 'glibc' else {}
  folder = cache_dir(env)
  if CACHE_DIR not in env and _writable(folder):
    wanted[CACHE_DIR] = str(folder)
  if CACHE_DIR in env or CACHE_DIR in wanted:
    wanted.update(CACHE)
  if not _library(env):
    env = {name: x for name, x in env.items() if name != LIBRARY}  # its file is gone
  return {name: value for name, value in wanted.items() if name not in env}


def _malloc_variables(env: Mapping[str, str], version: str) -> dict[str, str]:
  from kernels.native import kept_blocks  # once, before the process runs again

  limit, wanted = host_memory.read_host_memory().limit, dict(MALLOC)
  try:
    library = _library(env) or str(kept_blocks.build())
  except OSError as error:
    is_old = tuple(int(x) for x in re.findall(r'\d+', version)[:2]) < NEW_VERSION
    largest = SMALLEST if is_old else max(SMALLEST, int(limit * HEAP_SHARE))
    return wanted | {THRESHOLD: str(largest), OBSTACLE: str(error)}
  wanted |= {LIBRARY: library, THRESHOLD: str(SMALLEST)}
  wanted[kept_blocks.IDLE_BYTES] = str(min(int(limit * IDLE_SHARE), MOST_IDLE))
  return wanted


def tuned(env: Mapping[str, str]) -> dict[str, str]:
  """Returns the environment of a process that has everything from its start."""
  added = {**env, **missing_variables(env)}
  with preloading(added):
    return dict(added)


@contextlib.contextmanager
def preloading(env: MutableMapping[str, str]) -> Iterator[None]:
  """Lets processes that start in this context load the library, if there is one.

  Otherwise they do not: of what this process starts, only the actors of a run need it.
  """
  before, library = env.get(PRELOAD, ''), _library(env)
  if library:
    env[PRELOAD] = ':'.join([*_other_preloads(env), library])
  try:
    yield
  finally:
    _set_preload(env, before)


def _library(env: Mapping[str, str]) -> str:
  library = '' if env.get('JAXRL_TUNE') == '0' else env.get(LIBRARY, '')
  return library if os.path.exists(library) else ''


def _other_preloads(env: Mapping[str, str]) -> list[str]:
  return [x for x in env.get(PRELOAD, '').split(':') if x not in ('', env.get(LIBRARY))]


def _set_preload(env: MutableMapping[str, str], value: str) -> None:
  if value:
    env[PRELOAD] = value
  else:
    env.pop(PRELOAD, None)


def _writable(folder: pathlib.Path) -> bool:
  try:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
  except OSError:
    return False
  return os.access(folder, os.W_OK)


def apply() -> None:
  """Sets the variables, and executes the program again if malloc reads some of them.

  Call it in a program's first lines: what ran before runs again.
  """
  if os.environ.pop(REEXEC_FLAG, '') == str(os.getpid()):
    _set_preload(os.environ, ':'.join(_other_preloads(os.environ)))
    return
  missing = missing_variables(os.environ)
  os.environ.update(missing)
  if not _library(os.environ) and MALLOC.keys().isdisjoint(missing):
    return
  os.environ[REEXEC_FLAG] = str(os.getpid())
  sys.stdout.flush()
  with preloading(os.environ):
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def describe(env: Mapping[str, str]) -> str:
  """Returns one line that says what is in force."""
  if env.get('JAXRL_TUNE') == '0':
    return 'off (JAXRL_TUNE=0)'
  malloc = 'malloc as it is'
  if MALLOC.keys() <= env.keys():
    malloc = 'large blocks of memory kept'
    if not _library(env):
      why = f' (its library {env[OBSTACLE]})' if OBSTACLE in env else ''
      malloc = f'malloc keeps blocks{why}'
  folder = env.get(CACHE_DIR)
  cache = f'compiled programs cached in {folder}' if folder else 'no compilation cache'
  return f'{malloc}; {cache} (JAXRL_TUNE=0 turns both off)'
