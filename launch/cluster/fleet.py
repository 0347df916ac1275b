"""A number of engines, each of which is replaced when it is lost."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from jaxrl.signature import ConfigError
from launch.cluster.handles import CREATION, ActorError, EngineHandle, awaited, told

log = logging.getLogger(__name__)
CLOSING = 5.0  # seconds that engines have to let go of things


class Fleet:
  """A number of engines, which is kept up.

  start(number): makes one more actor, of a `Watched` class. restarts: how often in a
  row an engine may be lost before `steady` seconds have passed; then it is given up,
  and with the last of them the run. hang: seconds without an answer, or in one
  dispatch, after which an engine counts as lost; begin: the same for its start.
  interval: between questions after its health. backoff: by which the pause before
  each start grows.
  """

  def __init__(
    self,
    start: Callable[[int], Any],
    count: int,
    *,
    restarts: int = 3,
    steady: float = 300.0,
    hang: float = 600.0,
    begin: float = 3600.0,
    interval: float = 1.0,
    backoff: float = 2.0,
  ):
    self._start, self._restarts, self._steady = start, restarts, steady
    self._hang, self._begin = hang, begin
    self._interval, self._backoff = interval, backoff
    self._actors = [start(number) for number in range(count)]
    self.handles = [EngineHandle(actor) for actor in self._actors]
    self._given_up: dict[int, str] = {}
    self._hopeless: set[int] = set()  # those that refused to be made
    self._rejoin: Callable[[int, Any], Awaitable[None]] | None = None
    self._catch_up: Callable[[Any, str], Awaitable[None]] | None = None

  def serve(
    self,
    *,
    rejoin: Callable[[int, Any], Awaitable[None]] | None = None,
    catch_up: Callable[[Any, str], Awaitable[None]] | None = None,
  ) -> None:
    """rejoin(number, handle): tells whoever routes of a new engine. catch_up(handle,
    name): has it load the newest weights, if there are any.
    """
    self._rejoin, self._catch_up = rejoin or self._rejoin, catch_up or self._catch_up

  async def guard(self, work: Awaitable[Any]) -> Any:
    """`work`'s result. Meanwhile lost engines are replaced.

    Raises ActorError when none of them can be kept alive.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(self._watch())
    try:
      await asyncio.wait({task, watch}, return_when='FIRST_COMPLETED')
      return (task if task.done() else watch).result()
    finally:
      for one in (watch, task):
        one.cancel()
        with contextlib.suppress(BaseException):
          await one

  async def _watch(self) -> None:
    try:
      async with asyncio.TaskGroup() as group:
        for number in range(len(self._actors)):
          group.create_task(self._keep_up(number))
    except ExceptionGroup as errors:
      raise errors.exceptions[0] from None

  def failure(self) -> ActorError | ConfigError | None:
    """What ends the run, if anything does."""
    if len(self._given_up) < len(self._actors):
      return None
    number, reason = list(self._given_up.items())[-1]
    if len(self._hopeless) == len(self._actors):
      return ConfigError(f'no engine can be made: {reason}')
    return ActorError(
      'every engine is lost, and none can be started anew; the same command resumes '
      f'from the last checkpoint ({self._name(number)}: {reason})'
    )

  def _name(self, number: int) -> str:
    return f'engine {number + 1} of {len(self._actors)}'

  async def _keep_up(self, number: int) -> None:
    """Watches one engine, and starts another each time it is lost."""
    losses = 0
    while True:
      up = time.monotonic()
      reason = await self._lost(number)
      if time.monotonic() - up > self._steady:
        losses = 0
      while reason:
        losses += 1
        self._kill(number)
        if losses > self._restarts or number in self._hopeless:
          return self._give_up(number, losses, reason)
        log.warning(
          '%s was lost: another one is being started, and its requests go on from '
          'what it had written (%s)',
          self._name(number),
          reason,
        )
        await asyncio.sleep(self._backoff * (losses - 1))
        try:
          await self._replace(number)
          reason = ''
        except Exception as error:
          reason = told(error)

  async def _lost(self, number: int) -> str:
    """Returns when the engine is lost, and why."""
    actor, limit = self._actors[number], self._begin
    while True:
      try:
        health = awaited(actor.health.remote(self._hang))
        if reason := await asyncio.wait_for(health, limit):
          return reason
      except TimeoutError:
        return f'it has not answered for {limit:g} s'
      except Exception as error:
        if limit == self._begin and CREATION in str(error):
          self._hopeless.add(number)  # it would be refused again
        return told(error)
      limit = self._hang
      await asyncio.sleep(self._interval)

  async def _replace(self, number: int) -> None:
    """A new engine with the newest weights, which then is given requests."""
    begun = time.monotonic()
    actor = self._actors[number] = self._start(number)
    await asyncio.wait_for(awaited(actor.health.remote(self._hang)), self._begin)
    handle = self.handles[number]
    handle.become(actor)  # whoever publishes from here on reaches it
    if self._catch_up is not None:
      await asyncio.wait_for(self._catch_up(handle, self._name(number)), self._begin)
    if self._rejoin is not None:
      await self._rejoin(number, EngineHandle(actor))
    seconds = time.monotonic() - begun
    log.warning('%s is back, after %.1f s', self._name(number), seconds)

  def _give_up(self, number: int, losses: int, reason: str) -> None:
    self._given_up[number] = reason
    if (failure := self.failure()) is not None:
      raise failure
    log.warning(
      '%s was lost, %d times in a row: the run goes on without it (%s)',
      self._name(number),
      losses,
      reason,
    )

  def _kill(self, number: int) -> None:
    import ray

    self.handles[number].become(None)
    ray.kill(self._actors[number])

  def close(self) -> None:
    import ray

    closing = [actor.close.remote() for actor in self._actors]
    ray.wait(closing, num_returns=len(closing), timeout=CLOSING)
    for number in range(len(self._actors)):
      self._kill(number)
