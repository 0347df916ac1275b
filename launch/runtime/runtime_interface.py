"""The runtime interface makes the parts of a run: in this process, or as Ray actors.

`LocalRuntime` and `RayRuntime` have the same methods, so that a run is assembled by the
same code in both cases.
"""

import functools
import pathlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from jaxrl.device_thread import DeviceThread
from jaxrl.model_loading import LoadedModel
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.weights.weight_store import WeightStore
from launch.learner.learner_factory import LearnerFactory, MakeLearners
from launch.settings.run_settings import RunSettings


class Runtime(Protocol):
  """Makes the parts of a run where they are to live, and returns handles to them."""

  def spawn(self, cls: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Returns an object of class `cls`, or a handle whose methods are awaited."""
    ...

  def start_engines(
    self,
    model: TransformerLM,
    folder: pathlib.Path,
    device_thread: DeviceThread,
    count: int,
    options: Mapping[str, Any],
    kind: str = 'jax',
  ) -> list[Any]:
    """Starts engines.

    Args:
      model: The model that they serve.
      folder: Where the model and its tokenizer are.
      device_thread: The thread of engines in this process.
      count: Number of engines.
      options: Options of the engines, as in `EngineSettings`.
      kind: Kind of the engines, as in `EngineSettings`.

    Returns:
      The engines, or handles to them.
    """
    ...

  def make_weight_store(
    self, engines: list[Any], device_thread: DeviceThread
  ) -> WeightStore:
    """Returns what brings weights to the engines."""
    ...

  @property
  def description(self) -> str:
    """Who has which devices, to be shown to the user; '' if there is nothing to say."""
    ...

  @property
  def hosts_learner(self) -> bool:
    """True if this runtime hosts the learner; otherwise the caller makes its own."""
    ...

  def start_learners(
    self, settings: RunSettings, folder: pathlib.Path, make_learners: MakeLearners
  ) -> LearnerFactory:
    """Starts the learner's processes, if `hosts_learner`.

    Args:
      settings: The run's.
      folder: Where the policy is.
      make_learners: Makes what each of them makes learners with.
    """
    ...

  def make_router(self, engines: list[Any], **options: Any) -> Any:
    """Returns an `EngineRouter` with these options, or a handle to one."""
    ...

  async def supervise(self, work: Awaitable[Any]) -> Any:
    """Returns the result of `work`. Engines that are lost meanwhile are replaced."""
    ...

  async def run_worker(
    self, worker: functools.partial[Any], data: Mapping[str, Any]
  ) -> int:
    """Makes a worker, runs it to its end and returns the number of episodes it put."""
    ...

  def num_workers(self, count: int) -> int:
    """Returns how many workers to make when `count` are asked for."""
    ...

  async def call_actors(self, fn: Callable[[Any, str], Any]) -> dict[str, Any]:
    """Calls `fn(actor, name)` in the process of each actor.

    Args:
      fn: A function of a module, which other processes can import.

    Returns:
      The results by the actors' names; those that are lost or fail are left out.
    """
    ...

  async def metrics(self) -> dict[str, float]:
    """Returns the memory of the actors' processes, and workers replaced since.

    Returns:
      'memory/learner_gb', 'memory/engine_gb' and 'memory/worker_gb', the largest
      process of each kind in 10⁹ bytes, and 'rollout/workers_replaced' since the call
      before. {} if there are no actors.
    """
    ...

  async def root_cause(self, error: Exception) -> Exception:
    """Returns the error to show to the user: `error`, or the one that caused it."""
    ...

  async def close(self) -> None:
    """Ends everything that this runtime has started."""
    ...


def make_engines(
  settings: RunSettings,
  policy: LoadedModel,
  runtime: Runtime,
  device_thread: DeviceThread,
) -> tuple[list[Any], Any, WeightStore]:
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


async def supervise_run(runtime: Runtime, work: Awaitable[Any]) -> Any:
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
