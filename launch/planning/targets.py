"""Describes the machines that programs are compiled for, whether or not they are here.

`v5p:8x8x8` is a TPU slice by its chips, `h200:8` is a number of GPUs, eight a node, and
`cpu:2` means devices of this machine. The compilers run without the hardware; the extra
`targets` installs them. Importing this module does not import JAX, see
`set_compiler_env`.
"""

import dataclasses
import functools
import importlib.util
import logging
import math
import os
import re
from collections.abc import MutableMapping
from typing import Any

from jaxrl.device_thread import cpu_count
from jaxrl.options import ConfigError, unknown_name_error

GIB = 2**30
GPUS_PER_NODE = 8  # GPUs of a node
VIRTUAL_DEVICES_FLAG = '--xla_force_host_platform_device_count'
# TPU: without these libtpu asks the network what machine it is on, and for minutes;
# several processes may compile at once, for none of them holds a chip.
TPU_ENV = {
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_ACCELERATOR_TYPE': 'v5p-8',  # whatever is asked for: it quiets a warning
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
  'TPU_MIN_LOG_LEVEL': '3',
  'TPU_STDERR_LOG_LEVEL': '3',
}
# GPU: kernels cannot be timed against each other on a machine that has no GPU.
GPU_AUTOTUNE_FLAG = '--xla_gpu_autotune_level=0'


@dataclasses.dataclass(frozen=True)
class Chip:
  """Holds the rates of one device, as its maker states them; rates are per second.

  Attributes:
    kind: Name of the device.
    platform: 'tpu', 'cuda' or 'cpu'.
    memory: Bytes that programs may fill.
    flops: Dense bf16 operations, counting multiplications and additions.
    memory_rate: Bytes read from and written to memory.
    link: Bytes that a device sends in a collective along one axis of its fast links.
    inter_node_link: The same where the axis leaves the node; 0 if there are no nodes.
    network: Bytes that a device's share of its host's network carries.
  """

  kind: str
  platform: str
  memory: float
  flops: float
  memory_rate: float
  link: float
  inter_node_link: float
  network: float


# TPU: cloud.google.com/tpu/docs/{v5e,v5p,v6e}: bf16 peak, bandwidth of memory, links
# and data-centre network a chip. Of its memory a program can fill what libtpu's own
# error of a program that is too large gives as available. A link carries (v5e) 50,
# (v5p, v6e) 100 GB/s one way, and a ring along one axis of the torus uses two.
CHIPS = {
  'v5e': Chip('TPU v5e', 'tpu', 15.75 * GIB, 197e12, 819e9, 100e9, 0, 3.1e9),
  'v5p': Chip('TPU v5p', 'tpu', 95.73 * GIB, 459e12, 2765e9, 200e9, 0, 6.25e9),
  'v6e': Chip('TPU v6e', 'tpu', 31.24 * GIB, 918e12, 1640e9, 200e9, 0, 12.5e9),
  # nvidia.com/en-us/data-center/h100 and …/h200, SXM: dense bf16 is half of what is
  # given with sparsity, NVLink 900 GB/s both ways together; between nodes one 400 Gb/s
  # adapter a GPU (DGX H100/H200 user guide). JAX may fill all but what the driver and
  # its context hold, about 1.5 GB.
  'h100': Chip('NVIDIA H100 80GB', 'cuda', 83.5e9, 989e12, 3350e9, 450e9, 50e9, 50e9),
  'h200': Chip('NVIDIA H200 141GB', 'cuda', 139.5e9, 989e12, 4800e9, 450e9, 50e9, 50e9),
}
# A core of a present server with AVX2: 2.4 GHz × 2 units × 8 floats × 2; half of it is
# reached. Memory: two channels of DDR4. Not a data sheet's, but an assumption.
CPU_CORE, CPU_MEMORY_RATE = 75e9, 20e9

GPU_CAPABILITY, CUDNN_VERSION = '9.0', 91000  # of H100 and H200, and as below

# What XLA's compiler must know of a GPU that is not there, from its data sheet and
# NVIDIA's tables of compute capability 9.0.
GPU_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132
  fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: {bandwidth} l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: {memory}
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation" name: "{name}" driver_version: "13.0.0"
  runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""


@dataclasses.dataclass(frozen=True)
class Target:
  """Describes a machine to plan for.

  Attributes:
    name: The name that the user gave, as in 'v5p:2x2x2'.
    chip: Rates of one device.
    shape: Number of devices along each axis.
  """

  name: str
  chip: Chip
  shape: tuple[int, ...]

  @property
  def size(self) -> int:
    """Number of devices."""
    return math.prod(self.shape)


def parse_target(text: str) -> Target:
  """Parses a topology, as in 'v5p:8x8x8'.

  Raises:
    ConfigError: If the text names no known machine.
  """
  kind, _, size_text = text.partition(':')
  if kind != 'cpu' and kind not in CHIPS:
    raise unknown_name_error(kind, [*CHIPS, 'cpu'], 'machine', '--topology')
  chip, flag_text = _cpu_chip(1) if kind == 'cpu' else CHIPS[kind], f'--topology={text}'
  if not re.fullmatch(r'[1-9]\d*(x[1-9]\d*)*', size_text):
    example = {'tpu': f'{kind}:2x2', 'cuda': f'{kind}:8', 'cpu': 'cpu:1'}
    raise ConfigError(f'{flag_text}: how many? Write it as in {example[chip.platform]}')
  shape = tuple(map(int, size_text.split('x')))
  axes = {'v5e': 2, 'v6e': 2, 'v5p': 3}.get(kind, 1)
  if len(shape) != axes:
    form = 'x'.join('ABC'[:axes]) if axes > 1 else 'N'
    raise ConfigError(f'{flag_text}: must have the form {kind}:{form}')
  if chip.platform == 'cuda' and shape[0] > GPUS_PER_NODE and shape[0] % GPUS_PER_NODE:
    raise ConfigError(
      f'{flag_text}: a number above one node must be a multiple of {GPUS_PER_NODE} GPUs'
    )
  return Target(text, _cpu_chip(shape[0]) if kind == 'cpu' else chip, shape)


def _cpu_chip(devices: int) -> Chip:
  """Returns the share of this machine that each of `devices` devices has."""
  memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / devices
  cores, rate = cpu_count() / devices, CPU_MEMORY_RATE / devices
  flops = CPU_CORE * cores
  return Chip('this machine', 'cpu', memory, flops, rate, rate, 0, rate)


def set_compiler_env(
  target: Target, env: MutableMapping[str, str] | None = None
) -> None:
  """Sets the environment variables that a compiler reads; call it before importing JAX.

  Variables that are already set stay as they are. The process then computes on the CPU
  only, so that it takes no memory of this machine's accelerators from a run.

  Args:
    target: Machine to compile for.
    env: Environment to change, `os.environ` by default.
  """
  env = os.environ if env is None else env
  env.setdefault('JAX_PLATFORMS', 'cpu')
  flags = env.get('XLA_FLAGS', '')
  if target.chip.platform == 'tpu':
    for name, value in TPU_ENV.items():
      env.setdefault(name, value)
    return
  virtual = target.chip.platform == 'cpu' and target.size > 1
  wanted = f'{VIRTUAL_DEVICES_FLAG}={target.size}' if virtual else ''
  wanted = GPU_AUTOTUNE_FLAG if target.chip.platform == 'cuda' else wanted
  if wanted and wanted.partition('=')[0] not in flags:
    env['XLA_FLAGS'] = f'{flags} {wanted}'.strip()


def missing_compiler(target: Target) -> str:
  """Returns the package with the target's compiler if it is not installed, else ''."""
  names = {'tpu': ('libtpu', 'libtpu'), 'cuda': ('jax_plugins.xla_cuda13', '')}
  module, package = names.get(target.chip.platform, ('', ''))
  try:
    is_installed = not module or importlib.util.find_spec(module) is not None
  except ModuleNotFoundError:  # the package around it
    is_installed = False
  return '' if is_installed else package or 'jax-cuda13-plugin'


def target_devices(text: str) -> list[Any]:
  """Returns the devices of a topology, to compile programs for without running them.

  Args:
    text: The topology, as in 'v5p:2x2x2'.

  Raises:
    ConfigError: If the text is not a topology, or its compiler is not installed.
  """
  return list(_devices(parse_target(text)))


def _assume_cudnn() -> None:
  """Lets JAX trace cuDNN's attention in a process that has no GPU.

  JAX asks the GPU of the process for its compute capability, and the installed cuDNN
  for its version, neither of which is that of the machine to compile for. XLA compiles
  the call without either.
  """
  import jax

  from kernels import cudnn_attention

  try:
    library = cudnn_attention.library()
  except ImportError:  # another jax: attention then falls back to plain operations
    return
  if jax.default_backend() != 'cpu':
    return
  capability = tuple(map(int, GPU_CAPABILITY.split('.')))
  checks = {
    'check_cudnn_version': lambda: CUDNN_VERSION,
    'check_compute_capability': lambda text: (
      capability >= tuple(map(int, text.split('.')))
    ),
    'is_cuda_compute_capability_equal': lambda text: text == GPU_CAPABILITY,
  }
  for name, check in checks.items():
    if hasattr(library, name):
      setattr(library, name, check)


@functools.lru_cache(maxsize=16)
def _devices(target: Target) -> tuple[Any, ...]:
  flag_text, chip = f'--topology={target.name}', target.chip
  package = missing_compiler(target)
  if package:
    raise ConfigError(
      f'{flag_text}: the compiler for it is not installed here ({package}): '
      "pip install -e '.[targets]', or make env-targets"
    )
  set_compiler_env(target)
  import jax
  from jax.experimental import topologies

  if chip.platform != 'cpu':  # the plugin misses cuDNN, which no compiler here needs
    logging.getLogger('jax._src.xla_bridge').setLevel(logging.CRITICAL)
  if chip.platform == 'cuda':
    _assume_cudnn()
  if chip.platform == 'cpu':
    cpu_devices = jax.devices('cpu')
    if len(cpu_devices) < target.size:
      raise ConfigError(
        f'{flag_text}: this process has {len(cpu_devices)} CPU devices: start it with '
        f'XLA_FLAGS={VIRTUAL_DEVICES_FLAG}={target.size}'
      )
    return tuple(cpu_devices[: target.size])
  try:
    if chip.platform == 'tpu':
      description = topologies.get_topology_desc(target.name, 'tpu')
    else:
      num_nodes = -(-target.size // GPUS_PER_NODE)
      description = topologies.get_topology_desc(
        platform='cuda',
        topology_name=target.name,
        target_config=GPU_TARGET.format(
          name=chip.kind, bandwidth=int(chip.memory_rate), memory=int(chip.memory)
        ),
        topology=f'1x{num_nodes}x{min(target.size, GPUS_PER_NODE)}',
      )
  except Exception as error:  # each compiler raises a class of its own
    hint = ''
    if chip.platform == 'tpu':
      known = f'{target.name.partition(":")[0]}:{"x".join("4" * len(target.shape))}'
      hint = f'a slice is of hosts with 2x2 chips, as {known} is; the compiler says: '
    raise ConfigError(f'{flag_text}: {hint}{error}') from error
  return tuple(description.devices)
