"""Sets up every test process: eight virtual CPU devices and quick compilation.

Compiling is most of what the tests cost. LLVM's optimizations and XLA's fusion
emitters are therefore left out unless XLA_FLAGS says otherwise: a program then compiles
about six times as fast and computes the same. Programs are not cached on disk: with
compilation this quick, writing them takes longer than compiling the few that occur
again.
"""

import ctypes
import gc
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import sys

import hypothesis
import pytest

# Property tests have no deadline: on a busy machine an example may take long.
hypothesis.settings.register_profile('untimed', deadline=None)
hypothesis.settings.load_profile('untimed')

DEVICES = {'--xla_force_host_platform_device_count': '8'}
QUICK = {
  '--xla_backend_optimization_level': '0',
  '--xla_cpu_use_fusion_emitters': 'false',
  '--xla_cpu_parallel_codegen_split_count': '1',
}
ENOUGH = 5 << 29  # bytes of memory, past which a process lets its programs go
# Folders in the order in which their tests run. The tests with Ray run beside the first
# ones, which use one device: eight that wait for each other are slow on a busy machine.
# Long tests come next, so that the last ones are short.
ORDER = [
  'functional',
  'kernels',
  'launch',
  'examples',
  'docs',
  'recipes',
  'benchmarks',
  'models',
  'training',
  'rollout',
  'algorithms',
]


def add_flags(flags: str) -> str:
  """Adds to XLA_FLAGS the devices, and what compiles quickly unless a part is given."""
  added = {k: v for k, v in DEVICES.items() if k not in flags}
  if not any(flag in flags for flag in QUICK):  # xdist's workers inherit them
    added |= {flag: value for flag, value in QUICK.items() if known(flag)}
  return ' '.join([*flags.split(), *(f'{k}={v}' for k, v in added.items())])


def known(flag: str) -> bool:
  """Whether every XLA here has a flag: it ends a process that gives an unknown one.

  jaxlib 0.12 has no fusion emitters to switch off, and the XLA that the compilers for
  accelerators bring has no flags of the CPU's compiler.
  """
  if flag.startswith('--xla_cpu') and importlib.util.find_spec('jax_plugins'):
    return False
  major, minor = map(int, importlib.metadata.version('jaxlib').split('.')[:2])
  return flag != '--xla_cpu_use_fusion_emitters' or (major, minor) < (0, 11)


# Tracing makes many objects but few cycles, so collections may be rarer.
gc.set_threshold(200_000, 50, 100)
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = add_flags(os.environ.get('XLA_FLAGS', ''))
os.environ['HF_HUB_OFFLINE'] = '1'
# Modules too are compiled once, whatever the shell says: two seconds a process.
os.environ.pop('PYTHONDONTWRITEBYTECODE', None)
sys.dont_write_bytecode = False
# Source locations in programs serve profiles only, and cost a twentieth of the time.
os.environ['JAX_TRACEBACK_IN_LOCATIONS_LIMIT'] = '0'


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
  """Keeps a file's tests in one process, where they share what they compile."""
  for item in items:
    if item.get_closest_marker('xdist_group') is None:
      item.add_marker(pytest.mark.xdist_group(item.nodeid.split('::')[0]))
  items.sort(key=lambda item: _place(item.path))


def pytest_collection_finish():
  """Spares this process the keys of programs that are not cached anyway."""
  if 'jax' in sys.modules and 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
    sys.modules['jax'].config.update('jax_enable_compilation_cache', False)


def pytest_sessionfinish():
  """Excludes what the tests made from the collections at the end of a session.

  pytest makes five of them, which take seconds.
  """
  gc.freeze()


def _place(path: pathlib.Path) -> int:
  folder = path.relative_to(pathlib.Path(__file__).parent).parts[0]
  return ORDER.index(folder) if folder in ORDER else len(ORDER)


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
