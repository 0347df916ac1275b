"""A learner actor is one process of the learner; together they run one JAX program."""

import asyncio
import importlib
import logging
import pathlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

from jaxrl import model_loading
from jaxrl.device_thread import DeviceThread
from jaxrl.models.model_config import ModelConfig
from jaxrl.rollout.weights.direct_transfer import (
  TransferOptions,
  TransferReport,
  TransferTarget,
  gather_hf_tensors,
  make_engine_caller,
)
from jaxrl.rollout.weights.publisher import PublisherOptions, WeightPublisher
from jaxrl.rollout.weights.transport import Transport
from jaxrl.rollout.weights.weight_store import cast_copy
from jaxrl.training import batch_fields
from jaxrl.training.checkpointing import Checkpointer, CheckpointOptions
from jaxrl.training.learner import Learner
from jaxrl.training.parallelism import distributed
from jaxrl.types import Group, Params, PyTree, StateDict
from launch.learner import learner_factory
from launch.learner.learner_factory import MakeLearners, Metrics, PhaseSpec
from launch.settings.run_settings import RunSettings, WeightTransport

SENDER_MODULE = 'jaxrl.rollout.vllm.gpu_weight_sender'  # needs torch and vLLM

LogLines = list[tuple[int, str]]  # level and text
CheckpointPlace = tuple[pathlib.Path, CheckpointOptions]


class _LogCollector(logging.Handler):
  """Collects what this process logs, for the run's own process to log."""

  def __init__(self) -> None:
    super().__init__(logging.INFO)
    self._lines: LogLines = []

  def emit(self, record: logging.LogRecord) -> None:
    self._lines.append((record.levelno, record.getMessage()))

  def take(self) -> LogLines:
    """Returns the lines since the last call."""
    lines, self._lines = self._lines, []
    return lines


class LearnerActor:
  """One process of the learner. All processes get the same calls, in the same order.

  Args:
    settings: The run's.
    folder: Of the policy. Every machine sees it and the run's own folder.
    make_learners: Makes what this process makes learners with.
  """

  def __init__(
    self, settings: RunSettings, folder: pathlib.Path, make_learners: MakeLearners
  ):
    self._settings = settings
    self._folder = folder
    self._make_learners = make_learners
    self._device_thread = DeviceThread('learner')
    self._learner: Learner | None = None
    self._checkpointer: tuple[CheckpointPlace, Checkpointer] | None = None
    self._publisher: WeightPublisher | None = None
    self._sender: Any = None
    self._snapshots: dict[int, Params] = {}  # by id; 0 is none
    self._logs = _LogCollector()
    logger = logging.getLogger('jaxrl')
    logger.addHandler(self._logs)
    logger.setLevel(logging.INFO)

  async def host(self) -> str:
    """Returns the address by which other machines know this one."""
    from ray.util import get_node_ip_address

    return get_node_ip_address()

  async def coordinator_address(self, host: str) -> str:
    """Returns an address on this machine where the learner's processes can meet."""
    return distributed.find_free_address(host)

  async def connect(
    self, coordinator: str, num_processes: int, rank: int, address: str
  ) -> str:
    """Connects this process to the learner's other processes and loads the policy.

    Args:
      coordinator: The address where they meet.
      num_processes: Number of the learner's processes.
      rank: Number of this process.
      address: Of this machine.

    Returns:
      A description of the learner's devices.
    """
    self._rank = rank
    self._num_processes = num_processes
    if num_processes > 1:
      # Not on the device thread: it has to be done before JAX is used at all.
      await asyncio.to_thread(
        distributed.initialize, coordinator, num_processes, rank, address=address
      )
    settings = self._settings
    policy = model_loading.load_model(
      str(self._folder),
      value_head=settings.algorithm.value_loss is not None,
      **settings.compute_options,
    )
    teachers = None
    if batch_fields.asks_other_models(settings.algorithm):
      # Imported here because only algorithms that distil have teachers.
      from launch.learner.teacher_set import load_teachers

      teachers = load_teachers(settings, policy)
    mesh = learner_factory.make_run_mesh(settings.mesh)
    self._learners = self._make_learners(
      settings, policy, mesh, self._device_thread, teachers
    )
    return self._learners.describe()

  async def make(self, phase: PhaseSpec, continue_params: bool) -> None:
    """Makes the learner of a phase, as `LocalLearners.make`."""
    await self._close_checkpointer()
    self._learner = await self._learners.make(phase, continue_params=continue_params)

  @property
  def _current(self) -> Learner:
    assert self._learner is not None
    return self._learner

  async def warmup(self) -> tuple[Metrics, LogLines]:
    """Compiles the learner's programs; returns metrics and log lines."""
    return await self._current.warmup(), self._logs.take()

  async def update(self, groups: Sequence[Group]) -> tuple[Metrics, PyTree, LogLines]:
    """Does one update.

    Returns:
      Metrics, the whole advantages and log-probs (None where there are none, and except
      on the first process), and log lines.
    """
    metrics = await self._current.update(groups)
    rows = self._current.advantages, self._current.old_logprobs
    rows = await self._device_thread.run(distributed.gather_to_host, rows)
    if self._rank:
      rows = None, None
    return metrics, rows, self._logs.take()

  async def offload(self) -> None:
    """Moves the learner's state to the host's memory."""
    await self._current.offload()

  async def reload(self) -> None:
    """Moves the learner's state back to the devices."""
    await self._current.reload()

  async def save(self, place: CheckpointPlace, data: StateDict, wait: bool) -> None:
    """Saves a checkpoint, as `Learner.save`."""
    checkpointer = await self._open_checkpointer(place)
    await self._current.save(checkpointer, data, wait=wait)

  async def restore(self, place: CheckpointPlace) -> tuple[int, StateDict]:
    """Restores the newest checkpoint; returns its step and data."""
    data = await self._current.restore(await self._open_checkpointer(place))
    return self._current.step, data

  async def _open_checkpointer(self, place: CheckpointPlace) -> Checkpointer:
    if self._checkpointer is None or self._checkpointer[0] != place:
      await self._close_checkpointer()
      checkpointer = await self._device_thread.run(Checkpointer, *place)
      self._checkpointer = place, checkpointer
    return self._checkpointer[1]

  async def _close_checkpointer(self) -> None:
    """Waits for checkpoints that are being written."""
    if self._checkpointer is not None:
      (_, checkpointer), self._checkpointer = self._checkpointer, None
      await self._device_thread.run(checkpointer.close)

  async def snapshot(self, snapshot_id: int, keep: Collection[int] = ()) -> None:
    """Copies the parameters on the devices, to be published later.

    Args:
      snapshot_id: Of the copy.
      keep: Ids of older copies that are still to be published; others are released.
    """
    self._snapshots = {i: copy for i, copy in self._snapshots.items() if i in keep}
    params = await self._current.inference_params()
    self._snapshots[snapshot_id] = await self._device_thread.run(cast_copy, params)

  async def _params(self, snapshot_id: int) -> Params:
    if snapshot_id:
      return self._snapshots[snapshot_id]
    return await self._current.inference_params()

  async def publish(
    self,
    version: int,
    connect: Callable[[], Transport],
    transport: WeightTransport,
    snapshot_id: int,
  ) -> tuple[str, Metrics]:
    """Publishes this process's part of the parameters.

    Args:
      version: The number of the version.
      connect: Makes this process's end of the transport.
      transport: How weights are published.
      snapshot_id: Of the copy to publish, 0 for the newest parameters. It and older
        copies are released.

    Returns:
      The digest of the part, and what it took.
    """
    last_id = snapshot_id or max(self._snapshots, default=0)
    if self._publisher is None:
      assert isinstance(transport.options, PublisherOptions)
      self._publisher = WeightPublisher(
        connect(),
        device_thread=self._device_thread,
        part=self._rank,
        parts=self._num_processes,
        options=transport.options,
      )
    await self._publisher.publish(version, await self._params(snapshot_id))
    self._snapshots = {i: copy for i, copy in self._snapshots.items() if i > last_id}
    return self._publisher.digest, self._publisher.metrics()

  async def push(
    self,
    version: int | None,
    targets: Sequence[TransferTarget],
    backend: str,
    options: TransferOptions,
    snapshot_id: int,
  ) -> TransferReport | None:
    """Sends parameters to engines, GPU to GPU.

    Args:
      version: The number of the version; None for the newest parameters, whatever step
        they are of.
      targets: The engines.
      backend: 'ipc' or 'nccl'.
      options: How weights are sent.
      snapshot_id: As for `publish`.

    Returns:
      What was sent; None except on the first process.
    """
    if version is None:
      version, snapshot_id = self._current.step, 0
    params = await self._params(snapshot_id)
    if self._rank == 0 and self._sender is None:
      module = await asyncio.to_thread(importlib.import_module, SENDER_MODULE)  # slow
      call_engines = make_engine_caller(asyncio.get_running_loop())
      self._sender = module.GpuWeightSender(
        backend, self._model_config, call_engines, self._free_endpoint, options
      )
    report = await self._device_thread.run(
      self._send, version, params, targets, options
    )
    self._snapshots = {
      i: copy for i, copy in self._snapshots.items() if i > snapshot_id
    }
    return report

  def _send(
    self,
    version: int,
    params: Params,
    targets: Sequence[TransferTarget],
    options: TransferOptions,
  ) -> TransferReport | None:
    if self._sender is not None:
      return self._sender.send(version, params, targets)
    for _ in gather_hf_tensors(self._model_config, params, options.dtype):
      pass  # what is gathered for the first process, all of them gather
    return None

  @property
  def _model_config(self) -> ModelConfig:
    return self._learners.shape

  def _free_endpoint(self) -> tuple[str, int]:
    """Returns a host and port of this process at which nothing listens yet."""
    from ray.util import get_node_ip_address

    host, port = distributed.find_free_address(get_node_ip_address()).rsplit(':', 1)
    return host.strip('[]'), int(port)

  async def export(self, folder: pathlib.Path) -> None:
    """Saves the newest parameters as a Hugging Face folder."""
    await self._learners.export(folder)

  async def close(self) -> None:
    """Finishes the checkpoints being written and closes the ends of transports."""
    await self._close_checkpointer()
    if self._sender is not None:
      await self._device_thread.run(self._sender.close)
    if self._publisher is not None:
      await self._publisher.close()
