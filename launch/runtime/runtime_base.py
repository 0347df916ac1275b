"""A runtime makes the parts of a run: in this process, or as Ray actors.

`Runtime` makes them here. `RayRuntime` overrides each of its methods, so that a run is
assembled by the same code in both cases.
"""

import asyncio
import functools
import pathlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.device_thread import DeviceThread
from jaxrl.model_loading import LoadedModel
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.options import ConfigError, OptionValues
from jaxrl.rollout.engine import ENGINES
from jaxrl.rollout.engine.actor_proxy import maybe_await
from jaxrl.rollout.engine.router import EngineRouter, RoutedEngine
from jaxrl.rollout.weights.weight_store import InProcessWeightStore, WeightStore
from jaxrl.types import Value
from jaxrl.user_code import import_object
from launch.learner.learner_factory import LearnerFactory, MakeLearners
from launch.runtime.rollout_worker import RolloutWorker
from launch.settings.run_settings import RunSettings, WeightTransport

Parameters = ParamSpec('Parameters')


class Runtime:
  """Makes the parts of a run as plain objects of this process, or handles to others.

  Args:
    transport: How weights reach the engine: within the process, or through a folder in
      which other processes find them too.
  """

  def __init__(self, transport: WeightTransport | None = None):
    self._transport = transport or WeightTransport('inprocess')
    self._store: Any = None  # what `close` has to close, if anything

  @property
  def description(self) -> str:
    """Who has which devices, to be shown to the user; '' if there is nothing to say."""
    return ''

  @property
  def hosts_learner(self) -> bool:
    """True if this runtime hosts the learner; otherwise the caller makes its own."""
    return False

  def spawn(
    self,
    cls: Callable[Parameters, Value],
    *args: Parameters.args,
    **options: Parameters.kwargs,
  ) -> Value:
    """Returns an object of class `cls`, or a handle whose methods are awaited."""
    return cls(*args, **options)

  def start_engines(
    self,
    model: TransformerLM,
    folder: pathlib.Path,
    device_thread: DeviceThread,
    count: int,
    options: OptionValues,
    kind: str = 'jax',
  ) -> list[RoutedEngine]:
    """Starts engines; in this process one, as more would share the same devices.

    Args:
      model: The model that they serve.
      folder: Where the model and its tokenizer are.
      device_thread: The thread of engines in this process.
      count: Number of engines in processes of their own.
      options: Options of the engines, as in `EngineSettings`.
      kind: Kind of the engines, as in `EngineSettings`.

    Returns:
      The engines, or handles to them.
    """
    tokenizer = load_tokenizer(folder)
    engine_class = import_object(ENGINES.get(kind, kind))
    return [engine_class(model, tokenizer, device_thread=device_thread, **options)]

  def start_learners(
    self, settings: RunSettings, folder: pathlib.Path, make_learners: MakeLearners
  ) -> LearnerFactory:
    """Starts the learner's processes, if `hosts_learner`.

    Args:
      settings: The run's.
      folder: Where the policy is.
      make_learners: Makes what each of them makes learners with.
    """
    raise RuntimeError('a learner in this process is made by whoever runs it')

  def make_weight_store(
    self, engines: Sequence[RoutedEngine], device_thread: DeviceThread
  ) -> WeightStore:
    """Returns what brings weights to the engines."""
    if self._transport.name == 'inprocess':
      return InProcessWeightStore(
        *engines, device_thread=device_thread, options=self._transport.options
      )
    # Imported here because weights within a process need no transport.
    from jaxrl.rollout.weights.verified_store import EngineWeightClient
    from launch.runtime import weight_transport

    folder = weight_transport.open_transport(self._transport)
    clients = [EngineWeightClient(folder, engine.load) for engine in engines]
    self._store = weight_transport.make_store(
      self._transport, folder, clients, device_thread
    )
    return self._store

  def make_router(
    self, engines: Sequence[RoutedEngine], **options: Any
  ) -> EngineRouter:
    """Returns an `EngineRouter` with these options, or a handle to one."""
    return EngineRouter(engines, **options)

  async def supervise(self, work: Awaitable[Value]) -> Value:
    """Returns the result of `work`. Engines that are lost meanwhile are replaced."""
    return await work

  async def run_worker(
    self, worker: functools.partial[RolloutWorker], data: Mapping[str, int]
  ) -> int:
    """Makes a worker, runs it to its end and returns the number of episodes it put."""
    return await maybe_await(worker().run(data))

  def num_workers(self, count: int) -> int:
    """Returns how many workers to make when `count` are asked for: here, one."""
    return 1

  async def call_actors(self, fn: Callable[[Any, str], Value]) -> dict[str, Value]:
    """Calls `fn(actor, name)` in the process of each actor, if there are any.

    Args:
      fn: A function of a module, which other processes can import.

    Returns:
      The results by the actors' names; those that are lost or fail are left out.
    """
    return {}

  async def metrics(self) -> dict[str, float]:
    """Returns the memory of the actors' processes, and workers replaced since.

    Returns:
      'memory/learner_gb', 'memory/engine_gb' and 'memory/worker_gb', the largest
      process of each kind in 10⁹ bytes, and 'rollout/workers_replaced' since the call
      before. {} if there are no actors.
    """
    return {}

  async def root_cause(self, error: Exception) -> Exception:
    """Returns the error to show to the user: `error`, or the one that caused it."""
    return error

  async def close(self) -> None:
    """Ends everything that this runtime has started."""
    if self._store is not None:
      await self._store.close()


def make_engines(
  settings: RunSettings,
  policy: LoadedModel,
  runtime: Runtime,
  device_thread: DeviceThread,
) -> tuple[list[RoutedEngine], EngineRouter, WeightStore]:
  """Starts the engines of a run.

  Args:
    settings: The run's.
    policy: The model that the engines serve.
    runtime: Where they are to live.
    device_thread: The thread of engines in this process.

  Returns:
    The engines, a router to all of them, and the store that brings them weights.
  """
  engine = settings.engine
  engines = runtime.start_engines(
    policy.model,
    policy.folder,
    device_thread,
    settings.cluster.num_engines,
    engine.options,
    engine.kind,
  )
  router = runtime.make_router(
    engines, affinity_slack=max(settings.rollout.max_num_seqs // 4, 1)
  )
  return engines, router, runtime.make_weight_store(engines, device_thread)


async def supervise_run(runtime: Runtime, work: Awaitable[Value]) -> Value:
  """Returns the result of `work` while the runtime supervises it.

  Raises:
    Exception: The root cause of an error of `work`.
  """
  try:
    return await runtime.supervise(work)
  except Exception as error:
    cause = await runtime.root_cause(error)
    if cause is error:
      raise
    raise cause from error


class Restartable(Protocol):
  """What `run_with_restarts` asks of a trainer.

  Attributes:
    restarts: How often this command has started the run anew, after losing actors.
  """

  restarts: int

  async def train(self) -> bool:
    """Trains to the end or until asked to stop; returns whether it reached the end."""
    ...

  def newest_checkpoint(self) -> tuple[str, int] | None:
    """Returns the phase and step of the newest checkpoint; None before any."""
    ...


TrainerType = TypeVar('TrainerType', bound=Restartable)


def run_with_restarts(
  make_trainer: Callable[[], TrainerType],
  warn: Callable[[str], None],
  *,
  max_restarts: int = 3,
  pause: float = 10.0,
) -> tuple[TrainerType, bool]:
  """Trains, and starts anew from the newest checkpoint when an actor is lost.

  A trainer that cannot be made again counts as lost too, and after a pause there is
  another try: the config fitted the cluster, so it is the cluster that has changed.

  Args:
    make_trainer: Makes a trainer, whenever one is needed.
    warn: Takes a line for the user about each restart.
    max_restarts: Restarts in a row without a newer checkpoint.
    pause: Seconds before another try to make a trainer.

  Returns:
    The trainer that came to its end, and whether training reached its end.

  Raises:
    ActorError: If an actor is lost too often, or before there is a checkpoint.
  """
  newest, restarts, total_restarts = None, 0, 0
  while True:
    trainer = None
    try:
      trainer = make_trainer()
      trainer.restarts = total_restarts
      return trainer, asyncio.run(trainer.train())
    except Exception as error:
      # Imported here because most runs lose no actor.
      from launch.runtime.supervision import ActorError

      if trainer is None:
        if newest is None:
          raise
        checkpoint = newest
      elif isinstance(error, ActorError):
        checkpoint = trainer.newest_checkpoint()
      else:
        raise
      restarts = 1 if checkpoint != newest else restarts + 1
      total_restarts += 1
      newest = checkpoint
      if checkpoint is None or restarts > max_restarts:
        if isinstance(error, ConfigError):  # not a mistake of the user's any more
          raise ActorError(str(error)) from error
        raise
      phase, step = checkpoint
      reason = str(error) if trainer is None else str(error).partition(',')[0]
      warn(
        f'{reason}: the run goes on from its newest checkpoint, {phase} {step} '
        f'(resume {restarts} of {max_restarts})'
      )
    if trainer is None:
      time.sleep(pause)
