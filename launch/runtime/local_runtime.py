"""The local runtime runs all parts of a run in this process."""

import functools
import pathlib
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.device_thread import DeviceThread
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.engine import ENGINES
from jaxrl.rollout.engine.actor_proxy import maybe_await
from jaxrl.rollout.engine.router import EngineRouter
from jaxrl.rollout.weights.weight_store import InProcessWeightStore, WeightStore
from jaxrl.user_code import import_object
from launch.learner.learner_factory import LearnerFactory, MakeLearners
from launch.settings.run_settings import RunSettings, WeightTransport

if TYPE_CHECKING:
  from jaxrl.rollout.weights.verified_store import VerifiedWeightStore


class LocalRuntime:
  """Makes plain objects in this process, with one thread for the devices.

  Args:
    transport: How weights reach the engine: within the process, or through a folder in
      which other processes find them too.
  """

  description = ''
  hosts_learner = False

  def __init__(self, transport: WeightTransport | None = None):
    self._transport = transport or WeightTransport('inprocess')
    self._store: VerifiedWeightStore | None = None

  def spawn(self, cls: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Returns an object of class `cls`."""
    return cls(*args, **options)

  def start_engines(
    self,
    model: TransformerLM,
    folder: pathlib.Path,
    device_thread: DeviceThread,
    count: int,
    options: Mapping[str, Any],
    kind: str = 'jax',
  ) -> list[Any]:
    """Returns one engine whatever the count: more would share the same devices."""
    tokenizer = load_tokenizer(folder)
    engine_class = import_object(ENGINES.get(kind, kind))
    return [engine_class(model, tokenizer, device_thread=device_thread, **options)]

  def start_learners(
    self, settings: RunSettings, folder: pathlib.Path, make_learners: MakeLearners
  ) -> LearnerFactory:
    """Raises RuntimeError: the caller makes its own learner."""
    raise RuntimeError('a learner in this process is made by whoever runs it')

  def make_weight_store(
    self, engines: list[Any], device_thread: DeviceThread
  ) -> WeightStore:
    """Returns what brings weights to the engines."""
    if self._transport.name == 'inprocess':
      return InProcessWeightStore(
        *engines, device_thread=device_thread, **self._transport.options
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

  def make_router(self, engines: list[Any], **options: Any) -> EngineRouter:
    """Returns an `EngineRouter` with these options."""
    return EngineRouter(engines, **options)

  async def supervise(self, work: Awaitable[Any]) -> Any:
    """Returns the result of `work`."""
    return await work

  async def run_worker(
    self, worker: functools.partial[Any], data: Mapping[str, Any]
  ) -> int:
    """Makes a worker, runs it to its end and returns the number of episodes it put."""
    return await maybe_await(worker().run(data))

  def num_workers(self, count: int) -> int:
    """Returns 1: a process has one worker."""
    return 1

  async def call_actors(self, fn: Callable[[Any, str], Any]) -> dict[str, Any]:
    """Returns {}: there are no actors."""
    return {}

  async def metrics(self) -> dict[str, float]:
    """Returns {}: there are no actors."""
    return {}

  async def root_cause(self, error: Exception) -> Exception:
    """Returns the error."""
    return error

  async def close(self) -> None:
    """Closes the weight store."""
    if self._store is not None:
      await self._store.close()
