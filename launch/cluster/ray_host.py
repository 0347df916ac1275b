"""The parts of a run as Ray actors, on this machine or on an existing cluster."""

import asyncio
import inspect
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.dispatch import Dispatcher
from jaxrl.models.model import Model
from jaxrl.rollout.handles import Remote
from jaxrl.rollout.jax_engine import JaxEngine
from jaxrl.types import Params

# What the actors must see of this process's environment, for the same numbers.
PASSED_ON = ('JAX_', 'XLA_', 'HF_', 'MALLOC_', 'PYTHONPATH')


CALLS = 10_000  # at a time, to an actor whose methods are coroutines
THREADS = 8  # of an actor whose methods are not


class ActorError(OSError):
  """A part of the run that lived in a process of its own is gone."""


class EngineActor(JaxEngine):
  """A `JaxEngine` that makes its own tokenizer and device thread."""

  def __init__(self, model: Model, folder: pathlib.Path, **options: Any):
    tokenizer = load_tokenizer(folder)
    super().__init__(model, tokenizer, dispatcher=Dispatcher('engine'), **options)


class ObjectStoreWeights:
  """A `WeightStore` over Ray's object store: written once, read by every engine."""

  def __init__(self, engines: list[Any], dispatcher: Dispatcher):
    self._engines, self._dispatcher = engines, dispatcher
    self._newest: tuple[int, Any] | None = None
    self._news = asyncio.Event()

  async def publish(self, version: int, params: Params) -> None:
    """Hands `params` to every engine. Raises ValueError unless `version` rises."""
    if self._newest is not None and version <= self._newest[0]:
      raise ValueError(f'version {version} follows {self._newest[0]}: it must rise')
    reference = await self._dispatcher.run(self._put, params)
    await asyncio.gather(*(engine.load(version, reference) for engine in self._engines))
    self._newest = version, reference
    self._news.set()
    self._news = asyncio.Event()

  @staticmethod
  def _put(params: Params) -> Any:
    import ray

    return ray.put(jax.tree.map(lambda x: np.array(x), params))

  async def fetch(self, newer_than: int = -1) -> tuple[int, Params]:
    """Waits for a version past `newer_than`, as host arrays that are read-only."""
    while self._newest is None or self._newest[0] <= newer_than:
      await self._news.wait()
    version, reference = self._newest
    return version, await reference


class RayHost:
  """Starts Ray on this machine, for it alone, or joins the cluster at `address`."""

  def __init__(self, address: str = ''):
    ray = self._ray = _import(address)
    self._options: dict[str, Any] = {'num_cpus': 0}
    self._actors: list[tuple[str, Any]] = []
    self._started = not ray.is_initialized()
    if self._started and address:
      passed = {k: v for k, v in os.environ.items() if k.startswith(PASSED_ON)}
      self._options['runtime_env'] = {'env_vars': passed}
      ray.init(address=address, log_to_driver=False)
    elif self._started:  # the actors inherit this process's environment
      ray.init(include_dashboard=False, log_to_driver=False, logging_level='warning')

  def _actor(self, made: Callable[..., Any], *args: Any, **options: Any) -> Any:
    methods = (getattr(made, name) for name in dir(made))
    calls = CALLS if any(map(inspect.iscoroutinefunction, methods)) else THREADS
    remote = self._ray.remote(made).options(max_concurrency=calls, **self._options)
    actor = remote.remote(*args, **options)
    self._actors.append((getattr(made, '__name__', str(made)), actor))
    return Remote(actor)

  def spawn(self, made: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return self._actor(made, *args, **options)

  def engines(
    self,
    model: Model,
    folder: pathlib.Path,
    dispatcher: Dispatcher,
    count: int,
    options: Mapping[str, Any],
  ) -> list[Any]:
    folder = folder.absolute()
    return [self._actor(EngineActor, model, folder, **options) for _ in range(count)]

  def weights(self, engines: list[Any], dispatcher: Dispatcher) -> ObjectStoreWeights:
    return ObjectStoreWeights(engines, dispatcher)

  def workers(self, count: int) -> int:
    return count

  async def explain(self, error: Exception) -> Exception:
    """The error behind one that an actor raised; ActorError when an actor is gone."""
    from ray import exceptions

    while isinstance(error, exceptions.RayTaskError) and error.cause is not None:
      error = error.cause
    gone = await asyncio.gather(*(self._gone(actor) for _, actor in self._actors))
    for (name, _), reason in zip(self._actors, gone, strict=True):
      if reason is None:
        continue
      said = str(reason).strip().splitlines()
      # An error as it was made ends in that error; else its first line says most.
      line = said[-1] if 'creation task' in said[0] else ' '.join(said)[:200]
      return ActorError(
        f'the Ray actor {name} has died, and the run with it; the same command '
        f'resumes from the last checkpoint ({line})'
      )
    return error

  async def _gone(self, actor: Any) -> Exception | None:
    """Why an actor is no more; None while it lives, or is too busy to say."""
    try:
      await asyncio.wait_for(_awaited(actor.__ray_ready__.remote()), 2.0)
    except TimeoutError:
      return None
    except Exception as error:
      return error
    return None

  async def close(self) -> None:
    for _, actor in self._actors:
      self._ray.kill(actor)
    self._actors.clear()
    if self._started:
      self._ray.shutdown()


async def _awaited(reference: Any) -> Any:
  return await reference


def _import(address: str) -> Any:
  """Ray, which as it is imported reads whether it may be seen from other machines."""
  if not address:
    os.environ.setdefault('RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER', '0')
    os.environ.setdefault('RAY_worker_niceness', '0')  # they do the run's main work
  import ray

  return ray
