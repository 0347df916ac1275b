"""Parses `cluster.*` and `weight_sync.transport`: devices, and how weights travel."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl.component_table import ComponentTable
from jaxrl.config import with_options_of
from jaxrl.models.lora import Lora
from jaxrl.options import (
  AT_LEAST_ONE,
  NOT_NEGATIVE,
  ConfigError,
  Range,
  check_options,
  option_ranges,
  unknown_name_error,
)
from jaxrl.rollout.weights.weight_store import InProcessWeightStore
from jaxrl.run_options import ClusterOptions, RunOptions
from launch.settings.run_settings import (
  EngineSettings,
  PlacementSettings,
  WeightTransport,
)

WEIGHTS = '--config.weight_sync.transport'
PLACEMENT = '--config.cluster.placement'
DEVICE_SHARE = Range(0, 1, excludes_low=True)

_GPU_TO_GPU = ('nccl', 'ipc')
_NEEDS_RAY = ('object_store', 'shared_memory')


def make_transport(
  run: RunOptions, engine: EngineSettings, *, check_machine: bool = True
) -> WeightTransport:
  """Returns the transport that a call such as `checkpoint(folder='/shared')` describes.

  Args:
    run: The options of the run.
    engine: The run's engine.
    check_machine: Whether this machine must have what the transport needs.

  Raises:
    ConfigError: For an unknown transport or option, and for a transport that this
      engine, these adapters or a run of one process cannot use.
  """
  call, ray = run.weight_sync.transport, run.cluster.ray
  where = f'{WEIGHTS}={call}'
  name, options = call.name, dict(call.options)
  if name not in TRANSPORTS:
    raise unknown_name_error(name, TRANSPORTS, 'transport', WEIGHTS)
  folder = str(options.pop('folder', '')) if name == 'checkpoint' else ''
  check_options(with_options_of(_no_options, _option_sources(name)), options, where)
  _check_dtype(options.get('dtype'), where)
  for option in ('keep', 'full_every', 'chunk_bytes', 'blob_bytes', 'buffer_bytes'):
    if options.get(option, 1) < 1:
      raise ConfigError(f'{where}: {option} must be at least 1')
  problem = _process_problem(name, ray, folder)
  if not problem and name in _GPU_TO_GPU:
    problem = _gpu_problem(engine, check_machine)
  problem = problem or _adapter_problem(
    name, options, run.model.adapters, str(run.model.lora)
  )
  if problem:
    raise ConfigError(f'{where}: {problem}')
  if name == 'auto':
    name = 'object_store' if ray else 'inprocess'
  if name == 'shared_memory':
    options['full_every'] = 1  # nothing travels, and what is whole is loaded as it lies
  durable = options.pop('durable', True)
  return WeightTransport(name, options, folder and os.path.abspath(folder), durable)


def _option_sources(name: str) -> Mapping[Callable[..., Any], Sequence[str]]:
  """Returns a transport's options, and whose signatures give their types."""
  if name in ('auto', 'inprocess'):
    return {InProcessWeightStore: ('dtype',)}
  if name in _GPU_TO_GPU:
    # Imported here, as below, because weights within a process need none of it.
    from jaxrl.rollout.weights.direct_transfer import DirectWeightStore, TransferOptions

    return {
      DirectWeightStore: ('patience',),
      TransferOptions: ('dtype', 'buffer_bytes'),
    }
  from jaxrl.rollout.weights.publisher import VersionWriter, WeightPublisher
  from jaxrl.rollout.weights.transport import FolderTransport

  writer_options = ('keep', 'chunk_bytes', 'blob_bytes', 'patience')
  if name != 'shared_memory':
    writer_options = (*writer_options, 'full_every')
  sources: dict[Callable[..., Any], Sequence[str]] = {
    WeightPublisher: ('dtype', 'on_device', 'tend'),
    VersionWriter: writer_options,
  }
  if name == 'checkpoint':
    sources[FolderTransport] = ('durable',)
  return sources


def _check_dtype(dtype: str | None, where: str) -> None:
  """Raises ConfigError for a data type that weights cannot be sent in."""
  if dtype is None:
    return
  # Imported here because most runs leave the data type as it is.
  from jaxrl.rollout.weights.shards import SAFETENSORS_DTYPES

  float_dtypes = [name for name in SAFETENSORS_DTYPES if 'float' in name]
  if dtype not in float_dtypes:
    raise unknown_name_error(dtype, float_dtypes, 'dtype', where)


def _process_problem(name: str, ray: bool, folder: str) -> str:
  """Says why these processes cannot use a transport; '' if they can."""
  if name == 'inprocess' and ray:
    return "Ray's engines are separate processes: use auto or object_store"
  if name in _NEEDS_RAY and not ray:
    return 'needs --config.cluster.ray=true; for a single process use auto'
  if name == 'checkpoint' and not folder:
    return 'needs a folder: checkpoint(folder="/path/that/all/engines/see")'
  if name in _GPU_TO_GPU and not ray:
    return 'needs --config.cluster.ray=true; for a single process use auto'
  return ''


def _gpu_problem(engine: EngineSettings, check_machine: bool) -> str:
  """Says why learner or engine cannot send from GPU to GPU; '' if they can."""
  if engine.kind != 'vllm' or not engine.traits.receives_from_gpu:
    return (
      f'--config.rollout.engine={engine.kind} cannot receive weights from GPU '
      'to GPU, which only vllm can: use object_store'
    )
  if not check_machine:
    return ''
  from jaxrl.rollout.vllm import vllm_options  # only vLLM's engines need it

  if missing := vllm_options.gpu_transfer_problem():
    return (
      f"{missing} in the learner's own environment, where the learner uses "
      "vLLM's code to send: install the extra vllm there, with CUDA, or use "
      'shared_memory or object_store'
    )
  return ''


def _adapter_problem(
  name: str, options: Mapping[str, Any], adapters: Lora | None, adapters_text: str
) -> str:
  """Says why a transport cannot send adapters by themselves; '' if it need not."""
  if adapters is None or adapters.transfer == 'merged':
    return ''
  lora_flag = f"--config.model.lora={adapters_text}: send='{adapters.transfer}'"
  if name in ('shared_memory', *_GPU_TO_GPU):
    return (
      f'writes every version in full, which excludes {lora_flag}: use '
      'object_store, or leave send out'
    )
  if options.get('dtype'):
    return (
      f'dtype would round the adapters too ({lora_flag}): keep the base in bfloat16 by '
      "lora(base='bfloat16'), or leave send out"
    )
  return ''


def _no_options() -> None:
  """Takes no options."""


def auto_transport() -> None:
  """Takes `inprocess` in a single process, and `object_store` under Ray."""


def inprocess() -> None:
  """Passes the learner's arrays to the engine of the same process."""


def object_store() -> None:
  """Puts blobs into the object stores of Ray's nodes; a node fetches each once."""


def shared_memory() -> None:
  """Writes files in memory that all processes of one machine map; needs Ray."""


def checkpoint(*, folder: str = '') -> None:
  """Writes files into a folder that all processes share.

  Args:
    folder: The folder.
  """


def nccl() -> None:
  """Sends from one of the learner's GPUs to the GPUs of all vLLM engines; needs Ray."""


def ipc() -> None:
  """Copies within a GPU, from the learner's memory into vLLM's; needs Ray."""


TRANSPORTS = {
  'auto': auto_transport,
  'inprocess': inprocess,
  'object_store': object_store,
  'shared_memory': shared_memory,
  'checkpoint': checkpoint,
  'nccl': nccl,
  'ipc': ipc,
}


def transports() -> dict[str, Callable[..., None]]:
  """Returns the transports of weights by name, with all of their options."""
  return {
    name: with_options_of(function, _option_sources(name))
    for name, function in TRANSPORTS.items()
  }


@option_ranges(learners=AT_LEAST_ONE, devices=NOT_NEGATIVE, memory=DEVICE_SHARE)
def split(
  *, learners: int = 1, devices: int = 0, memory: float = 0.9
) -> PlacementSettings:
  """Gives learner and engines devices of their own.

  Args:
    learners: Processes of the learner, one a machine.
    devices: Devices of each of them; 0 leaves the engines theirs and takes the rest,
      or half if the number of engines is open.
    memory: Share of each device that whoever has it may take.
  """
  options = {'learners': learners, 'devices': devices, 'memory': memory}
  return PlacementSettings('split', options)


@option_ranges(memory=DEVICE_SHARE)
def colocated(
  *, memory: float = 0.9, learner: float = 0.0, sleep: bool = False
) -> PlacementSettings:
  """Has learner and engines share the same devices.

  Args:
    memory: Share of each device that all of them may take together.
    learner: The learner's part of that share; 0 takes what the engine leaves, or half.
    sleep: They have all of it in turns: an engine has no cache while the learner
      trains. In processes of their own it keeps no weights there either, nor the
      learner its state while the engine generates.
  """
  options = {'memory': memory, 'learner': learner, 'sleep': sleep}
  return PlacementSettings('colocated', options)


def auto() -> PlacementSettings:
  """Takes 'split' from two devices on, and 'colocated' on one.

  Where the learner's share is more than a machine has, it gets whole machines, with a
  process on each.
  """
  return PlacementSettings('auto', {})


PLACEMENTS = ComponentTable(
  'placement',
  'cluster.placement',
  {'auto': auto, 'split': split, 'colocated': colocated},
)


def make_placement(cluster: ClusterOptions) -> PlacementSettings:
  """Returns the placement that a call such as `split(learners=2)` describes.

  Args:
    cluster: The options of the cluster.

  Raises:
    ConfigError: For an unknown placement or option, or a number out of range.
  """
  placement = PLACEMENTS.build(cluster.placement)
  if placement.name == 'split' and not cluster.ray:
    raise ConfigError(
      f'{PLACEMENT}={cluster.placement}: needs --config.cluster.ray=true'
    )
  return placement
