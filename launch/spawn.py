"""Who hosts the parts of a run: this process, or actors (`launch.cluster`).

Both hosts have the same methods, so that the assembly is written once.
"""

import functools
import pathlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from jaxrl.config import Config
from jaxrl.data.chat import Chat
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.dispatch import Dispatcher
from jaxrl.envs.base import ISOLATED, factory, find
from jaxrl.models.model import Model
from jaxrl.rollout.call_pool import THREADS, CallPool
from jaxrl.rollout.env_manager import EnvWorld
from jaxrl.rollout.gateway.endpoint import Endpoint
from jaxrl.rollout.handles import settle
from jaxrl.rollout.jax_engine import JaxEngine
from jaxrl.rollout.rewards.stage import Rewards
from jaxrl.rollout.router import EngineRouter
from jaxrl.rollout.weight_store import InProcessWeights, WeightStore
from jaxrl.rollout.weights.pulls import PulledWeights, Puller
from jaxrl.rollout.worker import EnvWorker
from jaxrl.signature import ConfigError
from jaxrl.training.policy import Policy
from launch import engines, weights
from launch.learners import Learners
from launch.weights import Plan


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
    kind: str = 'jax',
  ) -> list[Any]:
    """`count` engines of a kind for `model`, which with its tokenizer lies in `folder`.

    kind, options: as `launch.engines.parse` has them.
    """
    ...

  def weights(self, engines: list[Any], dispatcher: Dispatcher) -> WeightStore: ...

  @property
  def told(self) -> str:
    """Who has which devices, for people; '' where it goes without saying."""
    ...

  @property
  def learns(self) -> bool:
    """Whether the learner too lives elsewhere; else whoever asks makes its own."""
    ...

  def learners(self, config: Config, folder: pathlib.Path) -> Learners:
    """Those that live elsewhere. folder: where the policy lies."""
    ...

  def router(self, engines: list[Any], **options: Any) -> Any:
    """An `EngineRouter`, or a handle of one. options: the router's."""
    ...

  async def guard(self, work: Awaitable[Any]) -> Any:
    """`work`'s result. What is lost meanwhile is replaced, if it can be."""
    ...

  async def play(self, worker: functools.partial[Any], data: Mapping[str, Any]) -> int:
    """Makes a worker and has it play to the end; the episodes that it put."""
    ...

  def workers(self, count: int) -> int:
    """How many workers to spawn when `count` are asked for."""
    ...

  async def explain(self, error: Exception) -> Exception:
    """What a run's error is to the user: itself, or what lies behind it."""
    ...

  async def close(self) -> None: ...


def make_engines(
  config: Config, policy: Policy, host: Host, dispatcher: Dispatcher
) -> tuple[list[Any], Any, WeightStore]:
  """Engines for `policy`, one router to all of them, and what brings them weights."""
  kind, options = engines.parse(config)
  own = policy.model, policy.folder, dispatcher
  made = host.engines(*own, config.cluster.num_engines, options, kind)
  router = host.router(made, slack=max(config.rollout.num_slots // 4, 1))
  return made, router, host.weights(made, dispatcher)


async def guarded(host: Host, work: Awaitable[Any]) -> Any:
  """`work`'s result, what is lost meanwhile replaced; of an error what lies behind."""
  try:
    return await host.guard(work)
  except Exception as error:
    told = await host.explain(error)
    if told is error:
      raise
    raise told from error


class LocalHost:
  """Everything in this process: plain objects, one thread for the devices.

  plan: how weights reach the engine: within the process, or through a folder in which
  others find them too.
  """

  def __init__(self, plan: Plan | None = None):
    self._plan = plan or Plan('inprocess')
    self._store: PulledWeights | None = None

  def spawn(self, made: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return made(*args, **options)

  def engines(
    self,
    model: Model,
    folder: pathlib.Path,
    dispatcher: Dispatcher,
    count: int,
    options: Mapping[str, Any],
    kind: str = 'jax',
  ) -> list[Any]:
    """One engine, whatever the count: more would share the same devices."""
    tokenizer = load_tokenizer(folder)
    return [JaxEngine(model, tokenizer, dispatcher=dispatcher, **options)]

  told, learns = '', False

  def learners(self, config: Config, folder: pathlib.Path) -> Learners:
    raise RuntimeError('a learner in this process is made by whoever runs it')

  def weights(self, engines: list[Any], dispatcher: Dispatcher) -> WeightStore:
    if self._plan.name == 'inprocess':
      return InProcessWeights(*engines, dispatcher=dispatcher, **self._plan.options)
    folder = weights.open_transport(self._plan)
    ends = [Puller(folder, engine.load) for engine in engines]
    self._store = weights.store(self._plan, folder, ends, dispatcher)
    return self._store

  def router(self, engines: list[Any], **options: Any) -> EngineRouter:
    return EngineRouter(engines, **options)

  async def guard(self, work: Awaitable[Any]) -> Any:
    return await work

  async def play(self, worker: functools.partial[Any], data: Mapping[str, Any]) -> int:
    return await settle(worker().run(data))

  def workers(self, count: int) -> int:
    return 1

  async def explain(self, error: Exception) -> Exception:
    return error

  async def close(self) -> None:
    if self._store is not None:
      await self._store.close()


class Worker(EnvWorker):
  """An `EnvWorker` that makes its own world, from what can be sent to a process.

  engine, queue, dataset: objects or handles. folder: where the tokenizer lies.
  concurrency: environments that act at once.
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
    concurrency: int = THREADS,
    rewards: Rewards | None = None,
  ):
    given = env_type, env_config, folder, engine, queue, dataset
    world = make_world(*given, concurrency=concurrency, rewards=rewards)
    super().__init__(world, places, options)


def make_world(
  env_type: str,
  env_config: Mapping[str, Any],
  folder: pathlib.Path,
  engine: Any,
  queue: Any,
  dataset: Any,
  *,
  concurrency: int = THREADS,
  rewards: Rewards | None = None,
) -> EnvWorld:
  """What the environments of a tag share."""
  chat, endpoint = Chat(load_tokenizer(folder)), None
  if getattr(find(env_type), 'played_by_agent', False):
    if env_type.startswith(ISOLATED):
      raise ConfigError(f'{env_type}: an agent is isolated by being a command')
    endpoint = Endpoint(engine, chat)
  return EnvWorld(
    make_env=factory(env_type, env_config),
    engine=engine,
    chat=chat,
    pool=CallPool(concurrency),
    queue=queue,
    dataset=dataset,
    rewards=rewards,
    endpoint=endpoint,
  )
