"""The parts of a run as Ray actors, on this machine or on an existing cluster."""

import asyncio
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import ray

from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.dispatch import Dispatcher
from jaxrl.models.model import Model
from jaxrl.rollout.handles import Remote
from jaxrl.rollout.jax_engine import JaxEngine
from jaxrl.types import Params

LOOPBACK = '127.0.0.1'
# What the actors must see of this process's environment, for the same numbers.
PASSED_ON = ('JAX_', 'XLA_', 'HF_', 'MALLOC_', 'PYTHONPATH')


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
    return ray.put(jax.tree.map(lambda x: np.array(x), params))

  async def fetch(self, newer_than: int = -1) -> tuple[int, Params]:
    """Waits for a version past `newer_than`, as host arrays that are read-only."""
    while self._newest is None or self._newest[0] <= newer_than:
      await self._news.wait()
    version, reference = self._newest
    return version, await reference


class RayHost:
  """Starts Ray on loopback, or joins the cluster at `address`."""

  def __init__(self, address: str = ''):
    passed = {k: v for k, v in os.environ.items() if k.startswith(PASSED_ON)}
    self._options = {'runtime_env': {'env_vars': passed}, 'num_cpus': 0}
    self._actors: list[Any] = []
    self._started = not ray.is_initialized()
    if self._started and address:
      ray.init(address=address, log_to_driver=False)
    elif self._started:
      ray.init(include_dashboard=False, _node_ip_address=LOOPBACK, log_to_driver=False)

  def _actor(self, made: Callable[..., Any], *args: Any, **options: Any) -> Any:
    actor = ray.remote(made).options(max_concurrency=10_000, **self._options)  # pyright: ignore
    self._actors.append(actor.remote(*args, **options))
    return Remote(self._actors[-1])

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

  async def close(self) -> None:
    for actor in self._actors:
      ray.kill(actor)
    self._actors.clear()
    if self._started:
      ray.shutdown()
