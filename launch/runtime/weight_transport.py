"""The weight transport connects learner and engines, as `weight_sync.transport` says.

Each process of the learner has a `WeightPublisher`, and each engine an
`EngineWeightClient`. The run tells the engines to load a version by a
`LoadCoordinator`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl.device_thread import DeviceThread
from jaxrl.options import ConfigError
from jaxrl.rollout.weights.publisher import PublisherOptions, WeightPublisher
from jaxrl.rollout.weights.transport import (
  FolderOptions,
  FolderTransport,
  SharedMemoryTransport,
  Transport,
  remove_abandoned,
)
from jaxrl.rollout.weights.verified_store import LoadCoordinator, VerifiedWeightStore
from launch.runtime.placement import Placement
from launch.settings.cluster_settings import WEIGHTS as KEY
from launch.settings.run_settings import WeightTransport


def check_placement(
  transport: WeightTransport, placement: Placement, machines: int = 1
) -> None:
  """Checks that learner and engines are placed as a transport needs.

  Args:
    transport: How weights travel.
    placement: Who has which devices.
    machines: Number of machines that learner and engines may be on.

  Raises:
    ConfigError: They are not.
  """
  where = f'{KEY}={transport.name}'
  if transport.name == 'shared_memory' and machines > 1:
    raise ConfigError(
      f'{where}: the {machines} machines of this run share no memory: use object_store'
    )
  if not transport.direct:
    return
  if not placement.learners and placement.bundles:
    raise ConfigError(
      f'{where}: this command has no learner that could send weights: use object_store'
    )
  if not any('GPU' in bundle for bundle in placement.bundles):
    raise ConfigError(
      f'{where}: there is no GPU here to send from: use shared_memory or object_store'
    )
  shared = placement.name == 'colocated'
  if transport.name == 'nccl' and shared:
    raise ConfigError(
      f'{where}: learner and engines are on the same GPUs (colocated), where '
      'NCCL cannot connect two processes: use ipc'
    )
  if transport.name == 'ipc' and not shared:
    raise ConfigError(
      f'{where}: learner and engines have separate GPUs ({placement.name}), '
      'and vLLM can only open memory of its own GPU: use nccl'
    )
  if transport.name == 'ipc' and len(placement.bundles) > 1:
    raise ConfigError(
      f'{where}: the {len(placement.bundles)} machines of this run cannot '
      'open memory of each other: use object_store'
    )


def open_transport(
  settings: WeightTransport, object_store: Callable[[], Transport] | None = None
) -> Transport:
  """Opens the learner's end of a transport; frees what killed runs left in memory.

  Args:
    settings: The transport.
    object_store: Makes a transport of Ray's object store, under Ray.
  """
  remove_abandoned()  # whichever transport this run uses
  if settings.name == 'object_store':
    assert object_store is not None
    return object_store()
  if settings.name == 'shared_memory':
    return SharedMemoryTransport()
  assert isinstance(settings.options, FolderOptions)
  return FolderTransport(settings.options.folder, durable=settings.options.durable)


def make_connector(transport: Transport) -> Callable[[], Transport]:
  """Returns a function that can be sent to another process and makes its end there."""
  if isinstance(transport, SharedMemoryTransport):
    return functools.partial(SharedMemoryTransport, transport.address)
  if isinstance(transport, FolderTransport):
    return functools.partial(
      FolderTransport, transport.path, durable=transport.durable, make=False
    )
  return functools.partial(_identity, transport)


def _identity(transport: Transport) -> Transport:
  return transport


def make_store(
  settings: WeightTransport,
  transport: Transport,
  engines: Sequence[Any],
  device_thread: DeviceThread,
) -> VerifiedWeightStore:
  """Returns the weight store of a learner with one process.

  Args:
    settings: How weights are published.
    transport: The learner's end.
    engines: Handles with a method `pull`, as `EngineWeightClient` has it.
    device_thread: The thread on which snapshots are taken.
  """
  assert isinstance(settings.options, PublisherOptions)
  publisher = WeightPublisher(
    transport, device_thread=device_thread, options=settings.options
  )
  return VerifiedWeightStore(publisher, LoadCoordinator(engines))
