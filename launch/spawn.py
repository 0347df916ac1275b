"""Who hosts the parts of a run: this process, or actors (`launch.cluster`).

Both hosts have the same methods, so that the assembly is written once.
"""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jaxrl.data.chat import Chat
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.dispatch import Dispatcher
from jaxrl.envs.base import factory
from jaxrl.models.model import Model
from jaxrl.rollout.call_pool import CallPool
from jaxrl.rollout.env_manager import EnvWorld
from jaxrl.rollout.jax_engine import JaxEngine
from jaxrl.rollout.weight_store import InProcessWeights, WeightStore
from jaxrl.rollout.worker import EnvWorker


class Host(Protocol):
  """Makes the parts of a run where they are to live, and returns handles to them."""

  def spawn(self, made: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """An object of class `made`, or a handle whose methods are awaited."""
    ...

  def engines(
    self,
    model: Model,
    folder: pathlib.Path,
    dispatcher: Dispatcher,
    count: int,
    options: Mapping[str, Any],
  ) -> list[Any]:
    """`count` engines for `model`, whose tokenizer lies in `folder`."""
    ...

  def weights(self, engines: list[Any], dispatcher: Dispatcher) -> WeightStore: ...

  def workers(self, count: int) -> int:
    """How many workers to spawn when `count` are asked for."""
    ...

  async def explain(self, error: Exception) -> Exception:
    """What a run's error is to the user: itself, or what lies behind it."""
    ...

  async def close(self) -> None: ...


class LocalHost:
  """Everything in this process: plain objects, one thread for the devices."""

  def spawn(self, made: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return made(*args, **options)

  def engines(
    self,
    model: Model,
    folder: pathlib.Path,
    dispatcher: Dispatcher,
    count: int,
    options: Mapping[str, Any],
  ) -> list[Any]:
    """One engine, whatever the count: more would share the same devices."""
    tokenizer = load_tokenizer(folder)
    return [JaxEngine(model, tokenizer, dispatcher=dispatcher, **options)]

  def weights(self, engines: list[Any], dispatcher: Dispatcher) -> WeightStore:
    return InProcessWeights(*engines, dispatcher=dispatcher)

  def workers(self, count: int) -> int:
    return 1

  async def explain(self, error: Exception) -> Exception:
    return error

  async def close(self) -> None:
    pass


class Worker(EnvWorker):
  """An `EnvWorker` that makes its own world, from what can be sent to a process.

  engine, queue, dataset: objects or handles. folder: where the tokenizer lies.
  """

  def __init__(
    self,
    env_type: str,
    env_config: Mapping[str, Any],
    folder: pathlib.Path,
    places: list[tuple[int, int]],
    options: Mapping[str, Any],
    *,
    engine: Any,
    queue: Any,
    dataset: Any,
  ):
    world = make_world(env_type, env_config, folder, engine, queue, dataset)
    super().__init__(world, places, options)


def make_world(
  env_type: str,
  env_config: Mapping[str, Any],
  folder: pathlib.Path,
  engine: Any,
  queue: Any,
  dataset: Any,
) -> EnvWorld:
  """What the environments of a tag share."""
  return EnvWorld(
    make_env=factory(env_type, env_config),
    engine=engine,
    chat=Chat(load_tokenizer(folder)),
    pool=CallPool(),
    queue=queue,
    dataset=dataset,
  )
