"""What every test process has: eight virtual CPU devices, programs compiled quickly.

Compiling is most of what the tests cost. LLVM's optimizations are therefore left out
unless XLA_FLAGS says otherwise, and each program is compiled once for all processes
of a session, those that tests start included: they share JAX's compilation cache.
"""

import atexit
import ctypes
import gc
import os
import platform
import shutil
import sys
import tempfile

import pytest

FLAGS = {
  '--xla_force_host_platform_device_count': 8,
  '--xla_backend_optimization_level': 0,
}
CACHE = 'JAX_COMPILATION_CACHE_DIR'
ENOUGH = 1 << 30  # bytes of memory, past which a process lets its programs go


def add_flags(given: str) -> str:
  """XLA_FLAGS with ours, but for those that it has."""
  ours = [f'{flag}={value}' for flag, value in FLAGS.items() if flag not in given]
  return ' '.join([*given.split(), *ours])


os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = add_flags(os.environ.get('XLA_FLAGS', ''))
os.environ['HF_HUB_OFFLINE'] = '1'
# Modules too are compiled once, whatever the shell says: two seconds a process.
os.environ.pop('PYTHONDONTWRITEBYTECODE', None)
sys.dont_write_bytecode = False
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '0'
if CACHE not in os.environ:  # xdist's workers inherit their parent's
  os.environ[CACHE] = tempfile.mkdtemp(prefix='xla-cache-')
  atexit.register(shutil.rmtree, os.environ[CACHE], ignore_errors=True)


@pytest.fixture(scope='module', autouse=True)
def bounded_memory():
  """Between modules: programs that were compiled for one are seldom another's."""
  yield
  if 'jax' in sys.modules and resident() > ENOUGH:
    sys.modules['jax'].clear_caches()
    gc.collect()
    if platform.libc_ver()[0] == 'glibc':
      ctypes.CDLL('libc.so.6').malloc_trim(0)


def resident() -> int:
  """Bytes of memory that this process holds; 0 where that is not told."""
  try:
    with open('/proc/self/statm') as file:
      return int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')
  except OSError:
    return 0
