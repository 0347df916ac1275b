"""The process environment is tuned before anything heavy is imported.

glibc's malloc returns freed pages to the system and faults them in again at every step,
which is worth it for the largest blocks alone; its settings are read when a process
starts, so the launcher executes itself again with them. JAX's compilation cache keeps
compiled programs between runs. JAXRL_TUNE=0 turns both off; a variable that is already
set is left as it is.
"""

import hashlib
import logging
import os
import pathlib
import platform
import re
import sys
from collections.abc import MutableMapping

from launch.runtime import host_memory

# Larger blocks are mapped by themselves and given back when they are freed. In the
# heap, a program's temporary memory can leave a hole that smaller arrays break up, so
# that the next step needs as much again. But a step that maps its memory anew may spend
# a third of its time on page faults. Older versions take 32 MiB at most.
MEMORY_SHARE, LARGEST_BLOCK = 1 / 8, 4 << 30
OLD_LIMIT, NEW_VERSION = 32 << 20, (2, 36)
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
REEXEC_FLAG = 'JAXRL_TUNED'  # set when the process has executed itself again

log = logging.getLogger(__name__)


def cache_dir(env: MutableMapping[str, str]) -> pathlib.Path:
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


def missing_variables(env: MutableMapping[str, str]) -> dict[str, str]:
  """Returns the variables that tuning would add to `env`."""
  if env.get('JAXRL_TUNE') == '0':
    return {}
  name, version = platform.libc_ver()
  wanted = dict(MALLOC) if name == 'glibc' else {}
  if wanted:
    is_old = tuple(int(x) for x in re.findall(r'\d+', version)[:2]) < NEW_VERSION
    largest = int(host_memory.read_host_memory().limit * MEMORY_SHARE)
    wanted[THRESHOLD] = str(min(largest, OLD_LIMIT if is_old else LARGEST_BLOCK))
  folder = cache_dir(env)
  if CACHE_DIR not in env and _writable(folder):
    wanted[CACHE_DIR] = str(folder)
  if CACHE_DIR in env or CACHE_DIR in wanted:
    wanted.update(CACHE)
  return {name: value for name, value in wanted.items() if name not in env}


def _writable(folder: pathlib.Path) -> bool:
  try:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
  except OSError:
    return False
  return os.access(folder, os.W_OK)


def apply() -> None:
  """Sets the variables, and executes the program again if malloc's are among them.

  Call it in a program's first lines: what ran before runs again.
  """
  missing = missing_variables(os.environ)
  os.environ.update(missing)
  if REEXEC_FLAG not in os.environ and not MALLOC.keys().isdisjoint(missing):
    os.environ[REEXEC_FLAG] = '1'
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def describe(env: MutableMapping[str, str]) -> str:
  """Returns one line that says what is in force."""
  if env.get('JAXRL_TUNE') == '0':
    return 'off (JAXRL_TUNE=0)'
  malloc = (
    'malloc keeps freed blocks' if MALLOC.keys() <= env.keys() else 'malloc as it is'
  )
  folder = env.get(CACHE_DIR)
  cache = f'compiled programs cached in {folder}' if folder else 'no compilation cache'
  return f'{malloc}; {cache} (JAXRL_TUNE=0 turns both off)'
