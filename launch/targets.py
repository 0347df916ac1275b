"""Machines that programs are compiled for, whether or not they are here.

`v5p:8x8x8` is a TPU slice by its chips, `h200:8` so many GPUs, eight a node, and
`cpu:2` devices of this machine. Their compilers run on a machine that has neither; the
extra `targets` brings them. Nothing here imports JAX before it must: see `prepare`.
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

from jaxrl import processors
from jaxrl.signature import ConfigError, unknown

GIB = 2**30
NODE = 8  # GPUs of a node
VIRTUAL = '--xla_force_host_platform_device_count'
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
GPU_FLAG = '--xla_gpu_autotune_level=0'


@dataclasses.dataclass(frozen=True)
class Chip:
  """What one device can do, as its maker states it; rates are a second.

  memory: bytes that programs may fill. flops: dense bf16, both multiplication and
  addition counted. memory_rate: bytes to and from memory. link: bytes that a device
  sends in a collective along one axis of its fast links. between: the same where the
  axis leaves the node; 0 where there is no such border. network: bytes that a device's
  share of its host's network carries.
  """

  kind: str
  platform: str
  memory: float
  flops: float
  memory_rate: float
  link: float
  between: float
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
  """name: as it was asked for. size: the number of devices."""

  name: str
  chip: Chip
  shape: tuple[int, ...]

  @property
  def size(self) -> int:
    return math.prod(self.shape)


def parse(text: str) -> Target:
  """'v5p:8x8x8' → its Target. Raises ConfigError for what is none."""
  kind, _, rest = text.partition(':')
  if kind != 'cpu' and kind not in CHIPS:
    raise unknown(kind, [*CHIPS, 'cpu'], 'machine', '--topology')
  chip, where = _cpu(1) if kind == 'cpu' else CHIPS[kind], f'--topology={text}'
  if not re.fullmatch(r'[1-9]\d*(x[1-9]\d*)*', rest):
    example = {'tpu': f'{kind}:2x2', 'cuda': f'{kind}:8', 'cpu': 'cpu:1'}
    raise ConfigError(f'{where}: say how many, as in {example[chip.platform]}')
  shape = tuple(map(int, rest.split('x')))
  axes = {'v5e': 2, 'v6e': 2, 'v5p': 3}.get(kind, 1)
  if len(shape) != axes:
    form = 'x'.join('ABC'[:axes]) if axes > 1 else 'N'
    raise ConfigError(f'{where}: its form is {kind}:{form}')
  if chip.platform == 'cuda' and shape[0] > NODE and shape[0] % NODE:
    raise ConfigError(f'{where}: more than one node is a multiple of {NODE} GPUs')
  return Target(text, _cpu(shape[0]) if kind == 'cpu' else chip, shape)


def _cpu(devices: int) -> Chip:
  """A share of this machine."""
  memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / devices
  cores, rate = processors.count() / devices, CPU_MEMORY_RATE / devices
  flops = CPU_CORE * cores
  return Chip('this machine', 'cpu', memory, flops, rate, rate, 0, rate)


def prepare(target: Target, env: MutableMapping[str, str] | None = None) -> None:
  """Sets what a compiler reads from the environment; before JAX is imported.

  What is set already stays. This process then computes on the CPU alone, so that it
  takes nothing from a run that has the devices of this machine.
  """
  env = os.environ if env is None else env
  env.setdefault('JAX_PLATFORMS', 'cpu')
  flags = env.get('XLA_FLAGS', '')
  if target.chip.platform == 'tpu':
    for name, value in TPU_ENV.items():
      env.setdefault(name, value)
    return
  virtual = target.chip.platform == 'cpu' and target.size > 1
  wanted = f'{VIRTUAL}={target.size}' if virtual else ''
  wanted = GPU_FLAG if target.chip.platform == 'cuda' else wanted
  if wanted and wanted.partition('=')[0] not in flags:
    env['XLA_FLAGS'] = f'{flags} {wanted}'.strip()


def missing(target: Target) -> str:
  """The package that the target's compiler is in, if it is not installed; else ''."""
  names = {'tpu': ('libtpu', 'libtpu'), 'cuda': ('jax_plugins.xla_cuda13', '')}
  module, package = names.get(target.chip.platform, ('', ''))
  try:
    there = not module or importlib.util.find_spec(module) is not None
  except ModuleNotFoundError:  # the package around it
    there = False
  return '' if there else package or 'jax-cuda13-plugin'


def topology(text: str) -> list[Any]:
  """The devices of `text`, for a mesh that programs are compiled for and never run on.

  Raises ConfigError for what is no topology or has no compiler here.
  """
  return list(_devices(parse(text)))


def _no_slice(target: Target) -> str:
  """What a slice must be, before the compiler's words; '' for what is none."""
  if target.chip.platform != 'tpu':
    return ''
  kind = target.name.partition(':')[0]
  form = 'x'.join(['4'] * len(target.shape))
  return f'a slice is of hosts with 2x2 chips, as {kind}:{form} is; the compiler says: '


@functools.lru_cache(maxsize=16)
def _devices(target: Target) -> tuple[Any, ...]:
  where, chip = f'--topology={target.name}', target.chip
  package = missing(target)
  if package:
    raise ConfigError(
      f'{where}: the compiler for it is not installed here ({package}): '
      "pip install 'jaxrl[targets]', or make env-targets"
    )
  prepare(target)
  import jax
  from jax.experimental import topologies

  if chip.platform != 'cpu':  # the plugin misses cuDNN, which no compiler here needs
    logging.getLogger('jax._src.xla_bridge').setLevel(logging.CRITICAL)
  if chip.platform == 'cpu':
    there = jax.devices('cpu')
    if len(there) < target.size:
      raise ConfigError(
        f'{where}: this process has {len(there)} CPU devices: start it with '
        f'XLA_FLAGS={VIRTUAL}={target.size}'
      )
    return tuple(there[: target.size])
  try:
    if chip.platform == 'tpu':
      name = {'topology_name': target.name}
      made = topologies.get_topology_desc(platform='tpu', **name)
    else:
      made = topologies.get_topology_desc(
        platform='cuda',
        topology_name=target.name,
        target_config=GPU_TARGET.format(
          name=chip.kind, bandwidth=int(chip.memory_rate), memory=int(chip.memory)
        ),
        topology=f'1x{-(-target.size // NODE)}x{min(target.size, NODE)}',
      )
  except Exception as error:  # each compiler raises a class of its own
    raise ConfigError(f'{where}: {_no_slice(target)}{error}') from error
  return tuple(made.devices)
