"""A remote learner is the run's own end of a learner that lives in actors.

The parameters stay with the `LearnerActor`s: `RemoteParams` says where they are, and
`RemotePublisher` has every process publish its part of them.
"""

import asyncio
import contextlib
import itertools
import logging
import pathlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl.rollout.engine.actor_proxy import ActorProxy
from jaxrl.rollout.weights.direct_transfer import (
  TransferOptions,
  TransferReport,
  TransferTarget,
)
from jaxrl.rollout.weights.subscriber import WeightSubscriber
from jaxrl.rollout.weights.transport import Transport
from jaxrl.training.checkpointing import Checkpointer
from jaxrl.types import Group, Params, StateDict
from launch.learner.learner_factory import Metrics, PhaseSpec
from launch.runtime.learner_actor import CheckpointPlace, LogLines
from launch.settings.run_settings import WeightTransport

CLOSE_TIMEOUT_S = 60.0  # for checkpoints to be written when a run ends
log = logging.getLogger(__name__)
_SNAPSHOT_IDS = itertools.count(1)


async def call_all(
  actors: Sequence[ActorProxy], method: str, *args: object
) -> list[Any]:
  """Makes the same call to each actor.

  Returns:
    The results; the first error is raised as soon as there is one.
  """
  return await asyncio.gather(*(getattr(actor, method)(*args) for actor in actors))


class RemoteParams:
  """The parameters of a learner that lives in actors.

  Args:
    actors: The learner's processes.
    lock: Held while all processes do what none can do alone, so that all of them do it
      in the same order.
    snapshot_id: Of a copy that they hold; 0 for the parameters that are the newest when
      they are published.
  """

  def __init__(
    self, actors: Sequence[ActorProxy], lock: asyncio.Lock, snapshot_id: int = 0
  ):
    self._actors = actors
    self._lock = lock
    self._snapshot_id = snapshot_id
    self._copies: weakref.WeakSet[RemoteParams] = weakref.WeakSet()

  async def snapshot(self) -> 'RemoteParams':
    """Returns a copy that lasts while the learner goes on.

    Earlier copies to which nobody here has a reference any more are released first.
    """
    copy = RemoteParams(self._actors, self._lock, next(_SNAPSHOT_IDS))
    keep = sorted(other._snapshot_id for other in self._copies)
    self._copies.add(copy)
    await call_all(self._actors, 'snapshot', copy._snapshot_id, keep)
    return copy

  async def publish(
    self, version: int, connect: Callable[[], Transport], transport: WeightTransport
  ) -> list[tuple[str, Metrics]]:
    """Has each process publish its part.

    Args:
      version: The number of the version.
      connect: Makes a process's end of the transport.
      transport: How weights are published.

    Returns:
      The digest of each part, and what it took.
    """
    return await call_all(
      self._actors, 'publish', version, connect, transport, self._snapshot_id
    )

  async def push(
    self,
    version: int | None,
    targets: Sequence[TransferTarget],
    backend: str,
    options: TransferOptions,
  ) -> TransferReport:
    """Has the processes send the parameters to engines, between two updates.

    Args:
      version: The number of the version; None for the newest parameters.
      targets: The engines.
      backend: 'ipc' or 'nccl'.
      options: How weights are sent.

    Returns:
      What was sent.
    """
    async with self._lock:
      reports = await call_all(
        self._actors, 'push', version, targets, backend, options, self._snapshot_id
      )
      return reports[0]


class RemotePublisher:
  """Takes the place of a `WeightPublisher` for a learner that lives in actors.

  Args:
    transport: How weights are published.
    connect: Makes an end of the transport, in any process.
    parts: Number of the learner's processes.

  Attributes:
    version: The newest version; None before the first.
  """

  def __init__(
    self,
    transport: WeightTransport,
    connect: Callable[[], Transport],
    *,
    parts: int,
  ):
    self._transport = transport
    self._connect = connect
    self._num_parts = parts
    self._published: list[tuple[str, Metrics]] = []  # digest and metrics of each part
    self._subscriber: WeightSubscriber | None = None
    self.version: int | None = None

  async def publish(self, version: int, params: RemoteParams) -> None:
    """Has each process of the learner publish its part of `params`."""
    self._published = await params.publish(version, self._connect, self._transport)
    self.version = version

  async def combined_digest(self) -> str:
    """Returns the digests of all parts of the newest version, joined by '-'."""
    return '-'.join(digest for digest, _ in self._published)

  def metrics(self) -> Metrics:
    """Returns what the newest version took, all processes together.

    Bytes are summed, shares are of all bytes, and times are the longest.
    """
    parts = [metrics for _, metrics in self._published]
    if not parts:
      return {}
    total = {
      name: max(part.get(name, 0.0) for part in parts)
      for name in dict.fromkeys(name for part in parts for name in part)
    }
    for name in ('weights/bytes', 'weights/full_bytes'):
      total[name] = sum(part.get(name, 0.0) for part in parts)
    # A process that holds few bytes, or none, counts as little.
    full = max(total['weights/full_bytes'], 1.0)
    total['weights/share'] = total['weights/bytes'] / full
    total['weights/changed'] = sum(
      part.get('weights/changed', 0.0) * part.get('weights/full_bytes', 0.0) / full
      for part in parts
    )
    return total

  async def fetch(self, newer_than: int = -1) -> tuple[int, Params]:
    """Returns (version, params) as an engine gets them: through the transport."""
    if self._subscriber is None:
      self._subscriber = WeightSubscriber(self._connect(), parts=self._num_parts)
    return await self._subscriber.fetch(newer_than)

  async def close(self) -> None:
    """Closes this process's end; the learner's processes close theirs."""
    if self._subscriber is not None:
      self._subscriber.close()


class RemoteLearner:
  """A `Learner` that lives in actors.

  Args:
    actors: The learner's processes.
    put: Stores groups where all processes can read them.

  Attributes:
    step: Number of updates done.
    advantages: Of the last update.
    params: Where the parameters are.
  """

  def __init__(
    self, actors: Sequence[ActorProxy], put: Callable[[list[Group]], object]
  ):
    self._actors = actors
    self._put = put
    self._lock = asyncio.Lock()
    self.step = 0
    self.advantages = self.old_logprobs = None
    self.params = RemoteParams(actors, self._lock)

  async def warmup(self) -> Metrics:
    """Compiles the learner's programs; returns metrics."""
    metrics, lines = (await call_all(self._actors, 'warmup'))[0]
    _log_lines(lines)
    return metrics

  async def inference_params(self) -> RemoteParams:
    """Returns where they are: adapters are merged there, when parameters are sent."""
    return self.params

  async def update(self, groups: Sequence[Group]) -> Metrics:
    """Does one update; returns metrics."""
    shared = await asyncio.to_thread(self._put, list(groups))
    async with self._lock:
      results = await call_all(self._actors, 'update', shared)
    metrics, (self.advantages, self.old_logprobs), lines = results[0]
    _log_lines(lines)
    self.step += 1
    return metrics

  async def save(
    self, checkpointer: Checkpointer, data: StateDict, *, wait: bool = False
  ) -> None:
    """Saves a checkpoint, as `Learner.save`."""
    async with self._lock:
      await call_all(self._actors, 'save', _checkpoint_place(checkpointer), data, wait)

  async def offload(self) -> None:
    """Moves the learner's state to the host's memory."""
    await call_all(self._actors, 'offload')

  async def reload(self) -> None:
    """Moves the learner's state back to the devices."""
    await call_all(self._actors, 'reload')

  async def restore(self, checkpointer: Checkpointer) -> StateDict:
    """Restores the newest checkpoint; returns its data."""
    results = await call_all(self._actors, 'restore', _checkpoint_place(checkpointer))
    self.step, data = results[0]
    return data


def _log_lines(lines: LogLines) -> None:
  for level, line in lines:
    log.log(level, '%s', line)


def _checkpoint_place(checkpointer: Checkpointer) -> CheckpointPlace:
  return checkpointer.directory, checkpointer.options


class RemoteLearnerFactory:
  """Makes the learners of a run's phases in actors.

  Args:
    actors: `LearnerActor`s that are connected.
    devices: A description of their devices.
    put: Stores groups where all processes can read them.
  """

  def __init__(
    self,
    actors: Sequence[ActorProxy],
    devices: str,
    put: Callable[[list[Group]], object],
  ):
    self._actors = actors
    self._devices = devices
    self._put = put

  def describe(self) -> str:
    """Returns a description of the devices and processes."""
    count = len(self._actors)
    return f'{self._devices}, in {count} process{"es" if count > 1 else ""}'

  async def make(
    self, phase: PhaseSpec, *, continue_params: bool = False
  ) -> RemoteLearner:
    """Makes the learner of a phase, as `LocalLearners.make`."""
    await call_all(self._actors, 'make', phase, continue_params)
    return RemoteLearner(self._actors, self._put)

  async def export(self, folder: pathlib.Path) -> None:
    """Saves the newest parameters as a Hugging Face folder."""
    await call_all(self._actors, 'export', folder.absolute())

  async def close(self) -> None:
    """Lets the processes finish the checkpoints being written, if they live."""
    with contextlib.suppress(Exception):
      async with asyncio.timeout(CLOSE_TIMEOUT_S):
        await call_all(self._actors, 'close')


async def connect_learner(actors: Sequence[ActorProxy]) -> str:
  """Connects new `LearnerActor`s to one learner; returns its devices' description."""
  hosts = await call_all(actors, 'host')
  coordinator = await actors[0].coordinator_address(hosts[0])
  calls = (
    actor.connect(coordinator, len(actors), rank, hosts[rank])
    for rank, actor in enumerate(actors)
  )
  return (await asyncio.gather(*calls))[0]
