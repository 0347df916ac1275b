"""Parses `cluster.*` and `weight_sync.transport`: devices, and how weights travel."""

import dataclasses
import os
from typing import Any, ClassVar

from jaxrl.component_calls import ComponentCall
from jaxrl.component_table import ComponentTable
from jaxrl.models.lora import Lora
from jaxrl.options import (
  ConfigError,
  option,
  unknown_name_error,
)
from jaxrl.rollout.weights.weight_store import InProcessOptions, WeightStoreOptions
from jaxrl.run_options import ClusterOptions, RunOptions
from launch.settings.run_settings import (
  EngineSettings,
  PlacementOptions,
  WeightTransport,
)

WEIGHTS = '--config.weight_sync.transport'
PLACEMENT = '--config.cluster.placement'

_GPU_TO_GPU = ('nccl', 'ipc')
_NEEDS_RAY = ('object_store', 'shared_memory')


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoTransportOptions(InProcessOptions):
  """Takes `inprocess` in a single process, and `object_store` under Ray."""


# By where they are, because weights within a process need none of the others.
TRANSPORTS = ComponentTable(
  'transport',
  'weight_sync.transport',
  {
    'auto': AutoTransportOptions,
    'inprocess': InProcessOptions,
    'object_store': 'jaxrl.rollout.weights.publisher:ObjectStoreOptions',
    'shared_memory': 'jaxrl.rollout.weights.publisher:SharedMemoryOptions',
    'checkpoint': 'jaxrl.rollout.weights.publisher:SharedFolderOptions',
    'nccl': 'jaxrl.rollout.weights.direct_transfer:NcclOptions',
    'ipc': 'jaxrl.rollout.weights.direct_transfer:IpcOptions',
  },
)


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
  name = call.name
  if name not in TRANSPORTS:
    raise unknown_name_error(name, TRANSPORTS, 'transport', WEIGHTS)
  options: Any = TRANSPORTS.build(call, where=where)
  _check_dtype(options.dtype, where)
  problem = _process_problem(name, ray, options)
  if not problem and name in _GPU_TO_GPU:
    problem = _gpu_problem(engine, check_machine)
  problem = problem or _adapter_problem(
    name, options, run.model.adapters, str(run.model.lora)
  )
  if problem:
    raise ConfigError(f'{where}: {problem}')
  if name == 'auto':
    name = 'object_store' if ray else 'inprocess'
    options = TRANSPORTS.build(ComponentCall(name, call.options))
  if name == 'checkpoint':
    options = options.replace(folder=os.path.abspath(options.folder))
  return WeightTransport(name, options)


def _check_dtype(dtype: str | None, where: str) -> None:
  """Raises ConfigError for a data type that weights cannot be sent in."""
  if dtype is None:
    return
  # Imported here because most runs leave the data type as it is.
  from jaxrl.rollout.weights.shards import SAFETENSORS_DTYPES

  float_dtypes = [name for name in SAFETENSORS_DTYPES if 'float' in name]
  if dtype not in float_dtypes:
    raise unknown_name_error(dtype, float_dtypes, 'dtype', where)


def _process_problem(name: str, ray: bool, options: Any) -> str:
  """Says why these processes cannot use a transport; '' if they can."""
  if name == 'inprocess' and ray:
    return "Ray's engines are separate processes: use auto or object_store"
  if name in _NEEDS_RAY and not ray:
    return 'needs --config.cluster.ray=true; for a single process use auto'
  if name == 'checkpoint' and not options.folder:
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
  name: str, options: WeightStoreOptions, adapters: Lora | None, adapters_text: str
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
  if options.dtype:
    return (
      f'dtype would round the adapters too ({lora_flag}): keep the base in bfloat16 by '
      "lora(base='bfloat16'), or leave send out"
    )
  return ''


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitOptions(PlacementOptions):
  """Gives learner and engines devices of their own."""

  name: ClassVar[str] = 'split'

  learners: int = option(1, 'Processes of the learner, one a machine.', low=1)
  devices: int = option(
    0,
    'Devices of each of them; 0 leaves the engines theirs and takes the rest, or half '
    'if the number of engines is open.',
    low=0,
  )
  memory: float = option(
    0.9, 'Share of each device that whoever has it may take.', above=0, high=1
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ColocatedOptions(PlacementOptions):
  """Has learner and engines share the same devices."""

  name: ClassVar[str] = 'colocated'

  memory: float = option(
    0.9, 'Share of each device that all of them may take together.', above=0, high=1
  )
  learner: float = option(
    0.0, "The learner's part of that share; 0 takes what the engine leaves, or half."
  )
  sleep: bool = option(
    False,
    'They have all of it in turns: an engine has no cache while the learner trains, '
    'and in processes of their own it keeps no weights there either, nor the learner '
    'its state while the engine generates.',
  )

  @property
  def sleeps(self) -> bool:
    """Whether the engine gives up its cache while the learner trains."""
    return self.sleep


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoPlacementOptions(PlacementOptions):
  """Takes 'split' from two devices on, and 'colocated' on one.

  Where the learner's share is more than a machine has, it gets whole machines, with a
  process on each.
  """

  name: ClassVar[str] = 'auto'


PLACEMENTS = ComponentTable(
  'placement',
  'cluster.placement',
  {'auto': AutoPlacementOptions, 'split': SplitOptions, 'colocated': ColocatedOptions},
)


def make_placement(cluster: ClusterOptions) -> PlacementOptions:
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
