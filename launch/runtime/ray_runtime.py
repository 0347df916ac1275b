"""The Ray runtime runs the parts of a run as Ray actors, here or on a cluster."""

import asyncio
import contextlib
import functools
import importlib
import inspect
import logging
import os
import pathlib
import secrets
import stat
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from jaxrl.device_thread import DeviceThread
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.options import Keywords, OptionValues
from jaxrl.rollout.engine.actor_proxy import ActorHandle, ActorProxy
from jaxrl.rollout.engine.router import EngineRouter, RoutedEngine
from jaxrl.rollout.weights.direct_transfer import (
  DirectWeightStore,
  TransferOptions,
  TransferTarget,
)
from jaxrl.rollout.weights.publisher import ObjectStoreOptions
from jaxrl.rollout.weights.transport import Transport
from jaxrl.rollout.weights.verified_store import LoadCoordinator, VerifiedWeightStore
from jaxrl.types import Value
from launch.learner.learner_factory import MakeLearners
from launch.runtime import process_env, supervision, weight_transport
from launch.runtime.engine_pool import EngineHandle, EnginePool
from launch.runtime.host_watch import HostWatch
from launch.runtime.learner_actor import LearnerActor
from launch.runtime.object_store import ObjectDirectory, ObjectStoreTransport
from launch.runtime.placement import ActorResources, Placement, plan_placement
from launch.runtime.placement_group import PlacementGroup, list_nodes
from launch.runtime.ray_engines import EngineActor, OwnEngineActor, VllmActor
from launch.runtime.remote_learner import (
  RemoteLearnerFactory,
  RemotePublisher,
  connect_learner,
)
from launch.runtime.rollout_worker import RolloutWorker
from launch.runtime.runtime_base import Parameters, Runtime
from launch.runtime.signal_handler import preserve_handlers
from launch.runtime.supervision import ActorError, run_worker_with_restart
from launch.settings.run_settings import RunSettings, WeightTransport

# What actors must see of this process's environment, to compute the same numbers.
FORWARDED_PREFIXES = ('JAX_', 'XLA_', 'HF_', 'MALLOC_', 'PYTHONPATH')
MAX_ASYNC_CALLS = 10_000  # at a time, to an actor whose methods are coroutines
MAX_THREADED_CALLS = 8  # to an actor whose methods are not
ACTOR_CALL_TIMEOUT_S = 120.0  # for a function that is called in all actors
METRICS_TIMEOUT_S = 10.0  # for an actor to say how much memory it takes
MEASURED_ACTORS = {
  'LearnerActor': 'learner',
  'engine': 'engine',
  'RolloutWorker': 'worker',
}
log = logging.getLogger(__name__)


class RayRuntime(Runtime):
  """Starts Ray on this machine, for this run alone, or joins a cluster.

  Args:
    address: Of a cluster; '' starts one.
    transport: How weights reach the engines.
  """

  def __init__(self, address: str = '', transport: WeightTransport | None = None):
    super().__init__(transport or WeightTransport('object_store', ObjectStoreOptions()))
    self._channel: Transport | None = None
    self._ray = ray = _import_ray(address)
    self._options: Keywords = {'num_cpus': 0}
    self._actors: list[tuple[str, ActorHandle]] = []
    self._pool: EnginePool | None = None
    self._workers_replaced = 0  # since they were last reported
    self._memory: asyncio.Future[dict[str, int]] | None = None  # being asked for
    self._group: PlacementGroup | None = None
    self._uses_sleep = False
    self._watch: supervision.ClusterWatch | None = None
    self._hosts: HostWatch | None = None  # of a cluster that was joined
    self._started = not ray.is_initialized()
    if self._started:
      supervision.shorten_ray_messages()
    if self._started and address:
      env = {k: v for k, v in os.environ.items() if k.startswith(FORWARDED_PREFIXES)}
      self._options['runtime_env'] = {'env_vars': env}
      with preserve_handlers():
        ray.init(address=address, log_to_driver=False)
    elif self._started:  # the actors inherit this process's environment
      # Without 'local' Ray joins what RAY_ADDRESS or a file of its own names, and waits
      # minutes for a cluster that died.
      quiet = {'log_to_driver': False, 'logging_level': 'warning'}
      quiet['_temp_dir'] = str(_session_root() / 'ray')
      with preserve_handlers(), process_env.preloading(os.environ):
        ray.init(address='local', include_dashboard=False, **quiet)

  def reserve(self, settings: RunSettings, *, has_learner: bool = True) -> Placement:
    """Reserves the devices that the run asks for.

    Args:
      settings: The run's.
      has_learner: Whether there is a learner, or engines only.

    Returns:
      Who has which devices.

    Raises:
      ConfigError: It cannot.
    """
    if self._started and not settings.cluster.address:
      self._watch = supervision.watch_cluster()
    lost_nodes = []
    if settings.cluster.address:
      self._hosts = HostWatch(
        self._ray, self._named_actors, timeout=settings.cluster.host_timeout
      )
      self._hosts.start()
      lost_nodes = self._hosts.lost_nodes()
    env = self._options.get('runtime_env', {}).get('env_vars', {})
    nodes = list_nodes(self._ray, lost_nodes)
    placement = plan_placement(settings, nodes, has_learner=has_learner)
    with_devices = [node for node in nodes if node.gpus or node.tpus]
    num_machines = len(with_devices or nodes)
    weight_transport.check_placement(self._transport, placement, num_machines)
    uses_gpus = any('GPU' in bundle for bundle in placement.bundles)
    if not settings.cluster.address and uses_gpus:
      env = {'NCCL_SOCKET_IFNAME': os.environ.get('NCCL_SOCKET_IFNAME', 'lo'), **env}
    self._group = PlacementGroup(placement, env, avoid=lost_nodes)
    self._uses_sleep = has_learner and settings.placement.sleeps
    return placement

  def _start(
    self,
    resources: ActorResources | None,
    cls: Callable[..., object],
    *args: object,
    python: str = '',
    **options: object,
  ) -> ActorHandle:
    """Starts an actor, with this interpreter unless `python` names another."""
    methods = (getattr(cls, name) for name in dir(cls))
    is_async = any(map(inspect.iscoroutinefunction, methods))
    max_calls = MAX_ASYNC_CALLS if is_async else MAX_THREADED_CALLS
    node_id = None
    if self._group is None:
      actor_options = self._options
    else:
      is_free = resources is not None and resources.bundle is None
      node_id = self._hosts.choose_node() if self._hosts and is_free else None
      actor_options = self._group.actor_options(resources, node_id)
    if python:
      runtime_env = {**actor_options.get('runtime_env', {}), 'py_executable': python}
      actor_options = {**actor_options, 'runtime_env': runtime_env}
    remote = self._ray.remote(cls).options(max_concurrency=max_calls, **actor_options)
    actor = remote.remote(*args, **options)
    if self._hosts is not None and node_id is not None:
      self._hosts.place(actor, node_id)
    return actor

  def spawn(
    self,
    cls: Callable[Parameters, Value],
    *args: Parameters.args,
    **options: Parameters.kwargs,
  ) -> Value:
    """Starts an actor of class `cls` and returns a handle."""
    handle: Any = self._register(cls, self._start(None, cls, *args, **options))
    return handle

  def _register(self, cls: Callable[..., object], actor: ActorHandle) -> ActorProxy:
    self._actors.append((getattr(cls, '__name__', str(cls)), actor))
    return ActorProxy(actor)

  @property
  def description(self) -> str:
    """Who has which devices, to be shown to the user."""
    return self._group.placement.description if self._group else ''

  @property
  def hosts_learner(self) -> bool:
    """True if the learner lives in actors; otherwise the caller makes its own."""
    return bool(self._group and self._group.placement.learners)

  def start_learners(
    self, settings: RunSettings, folder: pathlib.Path, make_learners: MakeLearners
  ) -> RemoteLearnerFactory:
    """Starts the learner's processes.

    Args:
      settings: The run's.
      folder: Where the policy is.
      make_learners: Makes what each of them makes learners with.
    """
    assert self._group is not None
    if self._uses_sleep and self._pool is not None:
      asyncio.run(self._put_to_sleep(self._pool.handles))
    folder = folder.absolute()
    started = [
      self._start(resources, LearnerActor, settings, folder, make_learners)
      for resources in self._group.placement.learners
    ]
    actors = [self._register(LearnerActor, actor) for actor in started]
    devices = asyncio.run(self._connect_learner(actors))
    return RemoteLearnerFactory(actors, devices, self._ray.put)

  async def _put_to_sleep(self, engines: Sequence[EngineHandle]) -> None:
    """Makes engines release the memory that they took when they started."""
    try:
      await asyncio.gather(*(engine.sleep() for engine in engines))
    except Exception as error:
      raise await self.root_cause(error) from error

  async def _connect_learner(self, actors: Sequence[ActorProxy]) -> str:
    try:
      return await connect_learner(actors)
    except Exception as error:
      raise await self.root_cause(error) from error

  def start_engines(
    self,
    model: TransformerLM,
    folder: pathlib.Path,
    device_thread: DeviceThread,
    count: int,
    options: OptionValues,
    kind: str = 'jax',
  ) -> list[RoutedEngine]:
    """Starts a pool of engine actors; for the arguments see `Runtime`.

    `device_thread` is not used: every engine has a process of its own.
    """
    options = dict(options)
    connect = None
    if self._transport.direct:
      options['transfer'] = self._transport.name
    else:
      connect = weight_transport.make_connector(self.channel())
    cls: type = VllmActor
    args: tuple[Any, ...] = folder.absolute(), connect
    if kind == 'jax':
      cls, args = EngineActor, (model, *args)
    elif kind != 'vllm':
      cls, args = OwnEngineActor, (kind, model, *args)
    python = options.pop('python', '') if kind == 'vllm' else ''
    engines: tuple[ActorResources, ...] = (ActorResources(),) * count
    if self._group is not None:
      engines = self._group.placement.engines
      options['parts'] = self._num_parts

    def start(number: int) -> ActorHandle:
      if self._pool is not None:
        self._forget_place(self._pool.actors[number])  # which this one replaces
      own_options = {**options, **engines[number].options}
      return self._start(engines[number], cls, *args, python=python, **own_options)

    self._pool = EnginePool(
      start,
      len(engines),
      host_is_lost=self._host_is_lost,
      forget=self._forget_place,
    )
    handles: list[Any] = self._pool.handles
    return handles

  def _host_is_lost(self, actor: ActorHandle) -> bool:
    return self._hosts is not None and self._hosts.has_ended(actor)

  def _forget_place(self, actor: ActorHandle) -> None:
    if self._hosts is not None:
      self._hosts.forget(actor)

  @property
  def _num_parts(self) -> int:
    """The number of processes that publish weights."""
    return max(1, len(self._group.placement.learners if self._group else ()))

  def make_router(
    self, engines: Sequence[RoutedEngine], **options: Any
  ) -> EngineRouter:
    """Starts one router for all workers, so that it knows the load of the engines."""
    router = self.spawn(EngineRouter, engines, **options)
    if self._pool is not None:
      self._pool.set_callbacks(rejoin=router.replace)
    return router

  def channel(self) -> Transport:
    """Returns the transport that weights go through, opened by the first call."""
    if self._channel is None:
      self._channel = weight_transport.open_transport(
        self._transport, lambda: ObjectStoreTransport(self.spawn(ObjectDirectory))
      )
    return self._channel

  def make_weight_store(
    self, engines: Sequence[RoutedEngine], device_thread: DeviceThread
  ) -> VerifiedWeightStore | DirectWeightStore:
    """Returns what brings weights to the engines."""
    if self._transport.direct:
      self._store = self._make_direct_store(engines)
    elif self.hosts_learner:
      connect = weight_transport.make_connector(self.channel())
      publisher = RemotePublisher(self._transport, connect, parts=self._num_parts)
      coordinator = LoadCoordinator(engines)
      self._store = VerifiedWeightStore(publisher, coordinator)  # pyright: ignore
    else:
      self._store = weight_transport.make_store(
        self._transport, self.channel(), engines, device_thread
      )
    if self._pool is not None:
      self._pool.set_callbacks(catch_up=self._store.catch_up)
    return self._store

  def _make_direct_store(self, engines: Sequence[RoutedEngine]) -> DirectWeightStore:
    """Returns a store whose weights the learner sends from its own GPUs."""
    assert self._group is not None
    targets = [
      TransferTarget(
        engine,
        int(resources.claims.get('GPU', len(resources.devices))),
        resources.devices,
      )
      for engine, resources in zip(engines, self._group.placement.engines, strict=True)
    ]
    options = self._transport.options
    assert isinstance(options, TransferOptions)
    return DirectWeightStore(
      targets,
      self._transport.name,
      options,
      engine_lost_error=ActorError,
    )

  def num_workers(self, count: int) -> int:
    """Returns `count`."""
    return count

  async def run_worker(
    self, worker: functools.partial[RolloutWorker], data: Mapping[str, int]
  ) -> int:
    """Runs a worker to its end, as `run_worker_with_restart`; returns its episodes."""
    env = self._group.placement.others.env if self._group else {}
    name = worker.func.__name__

    def start() -> tuple[ActorHandle, Awaitable[int]]:
      resources = ActorResources(env)
      actor = self._start(resources, worker.func, *worker.args, **worker.keywords)
      self._actors.append((name, actor))
      return actor, actor.run.remote(data)

    def forget(actor: ActorHandle) -> None:
      self._workers_replaced += 1
      self._ray.kill(actor)  # it may only have been out of reach
      self._actors[:] = [(n, known) for n, known in self._actors if known is not actor]
      self._forget_place(actor)

    return await run_worker_with_restart(
      start, forget, name, host_is_lost=self._host_is_lost
    )

  async def supervise(self, work: Awaitable[Value]) -> Value:
    """Returns the result of `work`; engines that are lost meanwhile are replaced."""
    return await (work if self._pool is None else self._pool.supervise(work))

  async def metrics(self) -> dict[str, float]:
    """Returns the memory of the actors' processes; see `Runtime`.

    Actors are asked now and their answers returned by a later call: no step waits for
    one that is busy.
    """
    metrics = {'rollout/workers_replaced': float(self._workers_replaced)}
    self._workers_replaced = 0
    if self._memory is None or self._memory.done():
      sizes = self._memory.result() if self._memory is not None else {}
      asking = self.call_actors(
        supervision.measure_memory, timeout=METRICS_TIMEOUT_S, warn=False
      )
      self._memory = asyncio.ensure_future(asking)
      for name, size in sizes.items():
        if kind := MEASURED_ACTORS.get(name.rpartition(' ')[0]):
          metric = f'memory/{kind}_gb'
          metrics[metric] = max(size / 1e9, metrics.get(metric, 0.0))
    return metrics

  def _named_actors(self) -> dict[str, ActorHandle]:
    """Returns the actors as they are now, by names such as `engine 2`."""
    kinds = list(self._actors)
    if self._pool is not None:
      kinds += [('engine', actor) for actor in self._pool.actors]
    counts: dict[str, int] = {}
    actors = {}
    for kind, actor in kinds:
      counts[kind] = counts.get(kind, 0) + 1
      actors[f'{kind} {counts[kind]}'] = actor
    return actors

  async def call_actors(
    self,
    fn: Callable[[Any, str], Value],
    *,
    timeout: float = ACTOR_CALL_TIMEOUT_S,
    warn: bool = True,
  ) -> dict[str, Value]:
    """Calls `fn(actor, name)` in each actor's process; see `Runtime`.

    Args:
      fn: A function of a module, which other processes can import.
      timeout: Seconds that each actor has.
      warn: Whether to log which of them do not answer.

    Returns:
      The results by the actors' names; those that are lost or fail are left out.
    """
    actors = self._named_actors()

    async def call(name: str, actor: ActorHandle) -> Value:
      async with asyncio.timeout(timeout):
        return await actor.__ray_call__.remote(fn, name)

    results = await asyncio.gather(
      *(call(name, actor) for name, actor in actors.items()), return_exceptions=True
    )
    for name, result in zip(actors, results, strict=True):
      if warn and isinstance(result, Exception):
        log.warning('%s did not answer: %s', name, supervision.error_summary(result))
    return {
      name: result
      for name, result in zip(actors, results, strict=True)
      if not isinstance(result, BaseException)
    }

  async def root_cause(self, error: Exception) -> Exception:
    """Returns the error behind one that an actor raised; ActorError if one is gone."""
    if self._pool is not None and (failure := self._pool.failure()) is not None:
      return failure
    return await supervision.root_cause(
      error, lambda: self._actors, several_learners=self._num_parts > 1
    )

  async def close(self) -> None:
    """Ends everything that this runtime has started, whatever of it is lost already."""
    async with contextlib.AsyncExitStack() as stack:
      if self._started:
        stack.callback(self._ray.shutdown)
      if self._watch is not None:
        stack.callback(self._watch.close)
      if self._hosts is not None:
        self._hosts.close()
      for part in (self._channel, self._group, self._pool):
        if part is not None:
          stack.callback(part.close)
      for _, actor in self._actors:
        stack.callback(self._ray.kill, actor)
      if self._store is not None:
        stack.push_async_callback(self._store.close)
      if self._memory is not None:
        self._memory.cancel()
    self._actors.clear()


def _import_ray(address: str) -> Any:
  """Imports Ray, which reads on import who may connect to it.

  A Ray of the run's own asks for a random token, which only this process and those that
  it starts know. A cluster that is joined has a token or none, as Ray's own variables
  say. A Ray that has been imported before is given the token.
  """
  if not address:
    os.environ.setdefault('RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER', '0')
    os.environ.setdefault('RAY_worker_niceness', '0')  # they do the run's main work
    if 'RAY_AUTH_MODE' not in os.environ:
      os.environ['RAY_AUTH_MODE'] = 'token'
      os.environ.setdefault('RAY_AUTH_TOKEN', secrets.token_hex(32))
  import ray

  own_token = not address and os.environ['RAY_AUTH_MODE'] == 'token'
  if own_token and not ray.is_initialized():
    core: Any = importlib.import_module('ray._raylet')
    if core.get_authentication_mode() != core.AuthenticationMode.TOKEN:
      core.Config.initialize('')  # reads the environment again
      core.AuthenticationTokenLoader.instance().reset_cache()
  return ray


def _session_root() -> pathlib.Path:
  """Returns a folder that only this user can enter, for the files of Ray's sessions.

  Ray lets everybody write to the folders that it makes: logs, sockets and code.

  Raises:
    OSError: Another user has put something in the folder's place.
  """
  parent = pathlib.Path(os.environ.get('RAY_TMPDIR') or tempfile.gettempdir())
  path = parent / f'jaxrl-{os.getuid()}'
  with contextlib.suppress(FileExistsError):
    path.mkdir(mode=0o700, parents=True)
  info = path.lstat()
  is_private = stat.S_ISDIR(info.st_mode) and not stat.S_IMODE(info.st_mode) & 0o077
  if not is_private or info.st_uid != os.getuid():
    raise PermissionError(
      f'{path}: other users can write or read there; remove it, or set RAY_TMPDIR to '
      'a folder of your own'
    )
  return path
