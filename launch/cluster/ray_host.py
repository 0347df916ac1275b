"""The parts of a run as Ray actors, on this machine or on an existing cluster."""

import asyncio
import contextlib
import functools
import inspect
import os
import pathlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from jaxrl.config import Config
from jaxrl.dispatch import Dispatcher
from jaxrl.models.model import Model
from jaxrl.rollout.handles import Remote
from jaxrl.rollout.router import EngineRouter
from jaxrl.rollout.weights.direct import DirectWeights, Sending, Target
from jaxrl.rollout.weights.pulls import PulledWeights, Pulls
from jaxrl.rollout.weights.transport import Transport
from launch import placement, weights
from launch.cluster.engines import EngineActor
from launch.cluster.fleet import Fleet
from launch.cluster.handles import ActorError
from launch.cluster.learners import LearnerActor, RemoteLearners, meet
from launch.cluster.nodes import explain, keep_playing
from launch.cluster.object_store import Directory, ObjectStore
from launch.cluster.placement import Seats, nodes
from launch.cluster.remote_params import RemoteBroadcast
from launch.cluster.vllm_actor import VllmActor
from launch.placement import Placement, Seat
from launch.weights import Plan

# What the actors must see of this process's environment, for the same numbers.
PASSED_ON = ('JAX_', 'XLA_', 'HF_', 'MALLOC_', 'PYTHONPATH')


CALLS = 10_000  # at a time, to an actor whose methods are coroutines
THREADS = 8  # of an actor whose methods are not


class RayHost:
  """Starts Ray on this machine, for it alone, or joins the cluster at `address`.

  plan: how weights reach the engines.
  """

  def __init__(self, address: str = '', plan: Plan | None = None):
    self._plan = plan or Plan('object_store')
    self._channel: Transport | None = None
    self._store: PulledWeights | DirectWeights | None = None
    ray = self._ray = _import(address)
    self._options: dict[str, Any] = {'num_cpus': 0}
    self._actors: list[tuple[str, Any]] = []
    self._fleet: Fleet | None = None
    self._seats: Seats | None = None
    self._sleeps = False
    self._started = not ray.is_initialized()
    if self._started and address:
      passed = {k: v for k, v in os.environ.items() if k.startswith(PASSED_ON)}
      self._options['runtime_env'] = {'env_vars': passed}
      ray.init(address=address, log_to_driver=False)
    elif self._started:  # the actors inherit this process's environment
      # Without 'local' Ray joins what RAY_ADDRESS or a file of its own names, and waits
      # minutes for a cluster that died.
      quiet = {'log_to_driver': False, 'logging_level': 'warning'}
      ray.init(address='local', include_dashboard=False, **quiet)

  def place(self, config: Config, *, learns: bool = True) -> Placement:
    """Reserves the devices that the run asks for. Raises ConfigError if it cannot.

    learns: whether there is a learner, or engines alone.
    """
    env = self._options.get('runtime_env', {}).get('env_vars', {})
    plan = placement.plan(config, nodes(self._ray), learns=learns)
    weights.check_devices(self._plan, plan)
    if not config.cluster.address and any('GPU' in bundle for bundle in plan.bundles):
      env = {'NCCL_SOCKET_IFNAME': os.environ.get('NCCL_SOCKET_IFNAME', 'lo'), **env}
    self._seats, self._sleeps = Seats(plan, env), learns and placement.sleeps(config)
    return self._seats.placement

  def _start(
    self,
    seat: Seat | None,
    made: Callable[..., Any],
    *args: Any,
    python: str = '',
    **options: Any,
  ) -> Any:
    """python: the interpreter, if not this process's."""
    methods = (getattr(made, name) for name in dir(made))
    calls = CALLS if any(map(inspect.iscoroutinefunction, methods)) else THREADS
    where = self._options if self._seats is None else self._seats.options(seat)
    if python:
      own = {**where.get('runtime_env', {}), 'py_executable': python}
      where = {**where, 'runtime_env': own}
    remote = self._ray.remote(made).options(max_concurrency=calls, **where)
    return remote.remote(*args, **options)

  def spawn(self, made: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return self._adopt(made, self._start(None, made, *args, **options))

  def _adopt(self, made: Callable[..., Any], actor: Any) -> Remote:
    self._actors.append((getattr(made, '__name__', str(made)), actor))
    return Remote(actor)

  @property
  def told(self) -> str:
    return self._seats.placement.told if self._seats else ''

  @property
  def learns(self) -> bool:
    return bool(self._seats and self._seats.placement.learners)

  def learners(self, config: Config, folder: pathlib.Path) -> RemoteLearners:
    """The learner's processes, where it does not live in the run's own."""
    assert self._seats is not None
    own, seats = (config, folder.absolute()), self._seats.placement.learners
    if self._sleeps and self._fleet is not None:
      asyncio.run(self._lay_down(self._fleet.handles))
    started = [self._start(seat, LearnerActor, *own) for seat in seats]
    actors = [self._adopt(LearnerActor, actor) for actor in started]
    devices = asyncio.run(self._meeting(actors))
    return RemoteLearners(actors, devices, self._ray.put)

  async def _lay_down(self, engines: list[Any]) -> None:
    """Engines take their memory as they start, and give it up before others need it."""
    try:
      await asyncio.gather(*(engine.sleep() for engine in engines))
    except Exception as error:
      raise await self.explain(error) from error

  async def _meeting(self, actors: list[Any]) -> str:
    try:
      return await meet(actors)
    except Exception as error:
      raise await self.explain(error) from error

  def engines(
    self,
    model: Model,
    folder: pathlib.Path,
    dispatcher: Dispatcher,
    count: int,
    options: Mapping[str, Any],
    kind: str = 'jax',
  ) -> list[Any]:
    direct, made, options = self._plan.direct, VllmActor, dict(options)
    end = None if direct else weights.elsewhere(self.channel())
    given: tuple[Any, ...] = folder.absolute(), end
    if direct:
      options['transfer'] = self._plan.name
    if kind == 'jax':
      made, given = EngineActor, (model, *given)
    python = options.pop('python', '')
    seats: tuple[Seat, ...] = (Seat(),) * count
    if self._seats is not None:
      seats = self._seats.placement.engines
      options = {**options, 'parts': self._parts}

    def start(number: int) -> Any:
      own = {**options, **seats[number].options}
      return self._start(seats[number], made, *given, python=python, **own)

    self._fleet = Fleet(start, len(seats))
    return self._fleet.handles

  @property
  def _parts(self) -> int:
    """Processes that publish weights."""
    return max(1, len(self._seats.placement.learners if self._seats else ()))

  def router(self, engines: list[Any], **options: Any) -> Any:
    """One for all workers: an actor, so that its counts are the engines' loads."""
    router = self.spawn(EngineRouter, engines, **options)
    if self._fleet is not None:
      self._fleet.serve(rejoin=router.replace)
    return router

  def channel(self) -> Transport:
    """What weights go through, made when first asked for."""
    if self._channel is None:
      make = lambda: ObjectStore(self.spawn(Directory))  # noqa: E731
      self._channel = weights.open_transport(self._plan, make)
    return self._channel

  def weights(
    self, engines: list[Any], dispatcher: Dispatcher
  ) -> PulledWeights | DirectWeights:
    if self._plan.direct:
      self._store = self._direct(engines)
    elif self.learns:
      connect = weights.elsewhere(self.channel())
      broadcast = RemoteBroadcast(self._plan, connect, parts=self._parts)
      self._store = PulledWeights(broadcast, Pulls(engines))  # pyright: ignore
    else:
      self._store = weights.store(self._plan, self.channel(), engines, dispatcher)
    if self._fleet is not None:
      self._fleet.serve(catch_up=self._store.catch_up)
    return self._store

  def _direct(self, engines: list[Any]) -> DirectWeights:
    """For engines that the learner sends to from its own GPUs."""
    assert self._seats is not None
    targets = [
      Target(engine, int(seat.claims.get('GPU', len(seat.devices))), seat.devices)
      for engine, seat in zip(engines, self._seats.placement.engines, strict=True)
    ]
    options = dict(self._plan.options)
    own = {k: options.pop(k) for k in ('patience',) if k in options}
    sending = Sending(**options)
    return DirectWeights(targets, self._plan.name, sending, lost=ActorError, **own)

  def workers(self, count: int) -> int:
    return count

  async def play(self, worker: functools.partial[Any], data: Mapping[str, Any]) -> int:
    """As `keep_playing`."""
    hides = self._seats.placement.others.env if self._seats else {}

    def start() -> tuple[Any, Any]:
      actor = self._start(Seat(hides), worker.func, *worker.args, **worker.keywords)
      self._actors.append((worker.func.__name__, actor))
      return actor, actor.run.remote(data)

    def forget(actor: Any) -> None:
      self._ray.kill(actor)  # which may only have been out of reach
      self._actors[:] = [(n, known) for n, known in self._actors if known is not actor]

    return await keep_playing(start, forget, worker.func.__name__)

  async def guard(self, work: Awaitable[Any]) -> Any:
    """`work`'s result; engines that are lost meanwhile are replaced."""
    return await (work if self._fleet is None else self._fleet.guard(work))

  async def explain(self, error: Exception) -> Exception:
    """The error behind one that an actor raised; ActorError when an actor is gone."""
    if self._fleet is not None and (failure := self._fleet.failure()) is not None:
      return failure
    return await explain(error, lambda: self._actors, several=self._parts > 1)

  async def close(self) -> None:
    # Whatever is lost already, all the rest is still to be let go of.
    async with contextlib.AsyncExitStack() as stack:
      if self._started:
        stack.callback(self._ray.shutdown)
      for part in (self._channel, self._seats, self._fleet):
        if part is not None:
          stack.callback(part.close)
      for _, actor in self._actors:
        stack.callback(self._ray.kill, actor)
      if self._store is not None:
        stack.push_async_callback(self._store.close)
    self._actors.clear()


def _import(address: str) -> Any:
  """Ray, which as it is imported reads whether it may be seen from other machines."""
  if not address:
    os.environ.setdefault('RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER', '0')
    os.environ.setdefault('RAY_worker_niceness', '0')  # they do the run's main work
  import ray

  return ray
