"""The engine pool keeps a number of engine actors running and replaces lost ones."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from jaxrl.options import ConfigError
from jaxrl.rollout.engine.actor_proxy import ActorHandle, EngineDeadError
from launch.runtime.supervision import (
  CREATION_FAILED,
  ActorError,
  error_summary,
)

log = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 5.0  # that engines have to release what would outlive them


class EngineHandle:
  """A handle of an engine actor, like an `ActorProxy`, which may be replaced.

  Calls raise `EngineDeadError` if the engine is lost.
  """

  def __init__(self, actor: ActorHandle | None):
    self._actor = actor

  def __reduce__(self):
    return EngineHandle, (self._actor,)

  def rebind(self, actor: ActorHandle | None) -> None:
    """Makes this a handle of another actor; None for none."""
    self._actor = actor

  def key(self) -> str:
    """Returns an id of the actor, which its replacement does not share."""
    actor: Any = self._actor
    return actor._actor_id.hex()

  def __getattr__(self, name: str) -> Any:
    if name.startswith('_'):
      raise AttributeError(name)

    async def call(*args: object, **options: object) -> Any:
      from ray.exceptions import ActorUnavailableError, RayActorError

      actor = self._actor  # while this waits, another may take its place
      if actor is None:
        raise EngineDeadError('the engine is being restarted')
      try:
        return await getattr(actor, name).remote(*args, **options)
      except RayActorError as error:
        if name == 'pull' and isinstance(error, ActorUnavailableError):
          _kill(actor)  # it may come back, but with which weights?
        raise EngineDeadError(error_summary(error)) from error

    return call


def _kill(actor: Any) -> None:
  import ray

  ray.kill(actor)


class EnginePool:
  """A number of engine actors, each of which is replaced when it is lost.

  Args:
    start: Makes the actor of a `MonitoredEngine`, given the engine's number.
    count: Number of engines.
    restarts: Times in a row that an engine may be lost before it is given up. The run
      ends with its last engine.
    steady: Seconds after which an engine counts as running well: losses start over.
    hang: Seconds without an answer, or in one dispatch, after which it counts as lost.
    begin: The same for its start.
    interval: Seconds between two health checks.
    backoff: Seconds by which the pause before each start grows.
    host_is_lost: Returns whether an actor's host is to blame for its loss, or it was
      moved to another one. Such a loss does not count.
    forget: Is called with the actor of an engine that is given up.

  Attributes:
    handles: Of the engines, which remain valid when an engine is replaced.
  """

  def __init__(
    self,
    start: Callable[[int], ActorHandle],
    count: int,
    *,
    restarts: int = 3,
    steady: float = 300.0,
    hang: float = 600.0,
    begin: float = 3600.0,
    interval: float = 1.0,
    backoff: float = 2.0,
    host_is_lost: Callable[[ActorHandle], bool] = lambda actor: False,
    forget: Callable[[ActorHandle], None] = lambda actor: None,
  ):
    self._host_is_lost, self._forget = host_is_lost, forget
    self._start = start
    self._max_restarts = restarts
    self._steady_s = steady
    self._hang_s = hang
    self._begin_s = begin
    self._interval_s = interval
    self._backoff_s = backoff
    self._actors = [start(number) for number in range(count)]
    self.handles = [EngineHandle(actor) for actor in self._actors]
    self._given_up: dict[int, str] = {}  # reasons by number
    self._failed_creation: set[int] = set()
    self._rejoin: Callable[[int, Any], Awaitable[None]] | None = None
    self._catch_up: Callable[[EngineHandle, str], Awaitable[None]] | None = None

  @property
  def actors(self) -> list[ActorHandle]:
    """The engines' actors as they are now."""
    return list(self._actors)

  def set_callbacks(
    self,
    *,
    rejoin: Callable[[int, Any], Awaitable[None]] | None = None,
    catch_up: Callable[[EngineHandle, str], Awaitable[None]] | None = None,
  ) -> None:
    """Sets what is called when an engine has been replaced; None changes nothing.

    Args:
      rejoin: Tells the router of the new engine, given its number and a handle.
      catch_up: Has the new engine load the newest weights, given a handle and its name.
    """
    self._rejoin = rejoin or self._rejoin
    self._catch_up = catch_up or self._catch_up

  async def supervise(self, work: Awaitable[object]) -> Any:
    """Returns the result of `work`. Engines that are lost meanwhile are replaced.

    Raises:
      ActorError: No engine can be kept alive.
      ConfigError: No engine can be made.
    """
    work_task = asyncio.ensure_future(work)
    watch_task = asyncio.ensure_future(self._watch())
    try:
      await asyncio.wait({work_task, watch_task}, return_when='FIRST_COMPLETED')
      return (work_task if work_task.done() else watch_task).result()
    finally:
      for task in (watch_task, work_task):
        task.cancel()
        with contextlib.suppress(BaseException):
          await task

  async def _watch(self) -> None:
    try:
      async with asyncio.TaskGroup() as group:
        for number in range(len(self._actors)):
          group.create_task(self._keep_running(number))
    except ExceptionGroup as errors:
      raise errors.exceptions[0] from None

  def failure(self) -> ActorError | ConfigError | None:
    """Returns the error that ends the run, if all engines have been given up."""
    if len(self._given_up) < len(self._actors):
      return None
    number, reason = list(self._given_up.items())[-1]
    if len(self._failed_creation) == len(self._actors):
      return ConfigError(f'no engine can be made: {reason}')
    return ActorError(
      'all engines are lost, and none could be restarted '
      f'({self._name(number)}: {reason}); the same command resumes from the '
      'last checkpoint'
    )

  def _name(self, number: int) -> str:
    return f'engine {number + 1} of {len(self._actors)}'

  async def _keep_running(self, number: int) -> None:
    """Watches one engine, and starts another each time it is lost."""
    losses = 0
    while True:
      start_time = time.monotonic()
      reason = await self._wait_until_lost(number)
      if time.monotonic() - start_time > self._steady_s:
        losses = 0
      attempts = 0
      while reason:
        attempts += 1
        losses += not self._host_is_lost(self._actors[number])
        self._end(number)
        if losses > self._max_restarts or number in self._failed_creation:
          return self._give_up(number, losses, reason)
        log.warning(
          '%s was lost and is being restarted; its requests continue from the '
          'tokens that it had generated (%s)',
          self._name(number),
          reason,
        )
        await asyncio.sleep(self._backoff_s * (max(losses, attempts) - 1))
        try:
          await self._replace(number)
          reason = ''
        except Exception as error:
          reason = error_summary(error)

  async def _wait_until_lost(self, number: int) -> str:
    """Returns when the engine is lost, and why."""
    actor, timeout = self._actors[number], self._begin_s
    while True:
      try:
        async with asyncio.timeout(timeout):
          reason = await actor.health.remote(self._hang_s)
        if reason:
          return reason
      except TimeoutError:
        return f'it has not answered for {timeout:g} s'
      except Exception as error:
        if timeout == self._begin_s and CREATION_FAILED in str(error):
          self._failed_creation.add(number)  # it would fail again
        return error_summary(error)
      timeout = self._hang_s
      await asyncio.sleep(self._interval_s)

  async def _replace(self, number: int) -> None:
    """Starts a new engine; it gets the newest weights, and then requests."""
    start_time = time.monotonic()
    actor = self._actors[number] = self._start(number)
    async with asyncio.timeout(self._begin_s):
      await actor.health.remote(self._hang_s)
    handle = self.handles[number]
    handle.rebind(actor)  # whoever publishes from here on reaches it
    if self._catch_up is not None:
      async with asyncio.timeout(self._begin_s):
        await self._catch_up(handle, self._name(number))
    if self._rejoin is not None:
      await self._rejoin(number, EngineHandle(actor))
    seconds = time.monotonic() - start_time
    log.warning('%s is back, after %.1f s', self._name(number), seconds)

  def _give_up(self, number: int, losses: int, reason: str) -> None:
    self._given_up[number] = reason
    self._forget(self._actors[number])
    if (failure := self.failure()) is not None:
      raise failure
    log.warning(
      '%s was lost, %d times in a row: the run goes on without it (%s)',
      self._name(number),
      losses,
      reason,
    )

  def _end(self, number: int) -> None:
    self.handles[number].rebind(None)
    _kill(self._actors[number])

  def close(self) -> None:
    """Ends the engines, after they have released what would outlive them."""
    import ray

    closing = [actor.close.remote() for actor in self._actors]
    ray.wait(closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
    for number in range(len(self._actors)):
      self._end(number)
