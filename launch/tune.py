"""What the launcher tunes by itself, before anything heavy is imported.

glibc's malloc gives freed pages back and faults them in again at every step; its
settings are read when a process starts, so the launcher runs itself anew with them.
JAX's compilation cache keeps compiled programs between runs. JAXRL_TUNE=0 does
neither; a variable that is already set is left as it is.
"""

import hashlib
import os
import pathlib
import platform
import sys
from collections.abc import MutableMapping

MALLOC = {
  'MALLOC_MMAP_MAX_': '0',
  'MALLOC_TRIM_THRESHOLD_': str(16 << 30),
  'MALLOC_TOP_PAD_': str(64 << 20),
  'MALLOC_ARENA_MAX': '1',
}
CACHE = {
  'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
  'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '0',
}
CACHE_DIR = 'JAX_COMPILATION_CACHE_DIR'
MARK = 'JAXRL_TUNED'  # set in the second life of the process


def cache_dir(env: MutableMapping[str, str]) -> pathlib.Path:
  """This user's cache, a folder per processor model: programs hold its instructions."""
  home = env.get('XDG_CACHE_HOME') or os.path.join(os.path.expanduser('~'), '.cache')
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
    model = [line for line in lines if line.startswith(('flags', 'Features'))][:1]
  except OSError:
    model = [platform.processor()]
  mark = hashlib.sha256(f'{platform.machine()}{model}'.encode()).hexdigest()[:8]
  return pathlib.Path(home) / 'jaxrl' / f'xla-{mark}'


def settings(env: MutableMapping[str, str]) -> dict[str, str]:
  """The variables that tuning would add to `env`."""
  if env.get('JAXRL_TUNE') == '0':
    return {}
  wanted = dict(MALLOC) if platform.libc_ver()[0] == 'glibc' else {}
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
  """Sets the variables; runs the program anew when malloc's are among them.

  Only for a program's own first lines: what ran before runs again.
  """
  missing = settings(os.environ)
  os.environ.update(missing)
  if MARK not in os.environ and not MALLOC.keys().isdisjoint(missing):
    os.environ[MARK] = '1'
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def describe(env: MutableMapping[str, str]) -> str:
  """One line: what is in force."""
  if env.get('JAXRL_TUNE') == '0':
    return 'off (JAXRL_TUNE=0)'
  malloc = (
    'malloc keeps its pages' if MALLOC.keys() <= env.keys() else 'malloc as it is'
  )
  folder = env.get(CACHE_DIR)
  cache = f'compiled programs cached in {folder}' if folder else 'no compilation cache'
  return f'{malloc}; {cache} (JAXRL_TUNE=0 turns both off)'
