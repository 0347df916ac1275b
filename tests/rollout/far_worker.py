"""A worker in a process of its own, which asks the queue by a pipe, and may die."""

import asyncio
import contextlib
import itertools
import multiprocessing
import time
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from typing import Any

from jaxrl.rollout.env_worker import EnvWorker
from tests.rollout.fakes import EchoEnv, FakeEngine, world

_SPAWN = multiprocessing.get_context('spawn')
Places = list[tuple[int, int]]


class Slow(EchoEnv):
  """Two turns of some milliseconds."""

  def step(self, action: str) -> Any:
    time.sleep(0.003)
    return super().step(action)


class FarQueue:
  """The queue at the other end of a pipe."""

  def __init__(self, pipe: Connection):
    self._pipe, self._ids = pipe, itertools.count()
    self._pending: dict[int, asyncio.Future] = {}
    asyncio.get_running_loop().add_reader(pipe.fileno(), self._hear)

  def _hear(self) -> None:
    number, answer = self._pipe.recv()
    self._pending.pop(number).set_result(answer)

  def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def ask(*args: Any) -> Any:
      number = next(self._ids)
      future = self._pending[number] = asyncio.get_running_loop().create_future()
      self._pipe.send((number, method, args))
      return await future

    return ask


class Stalls(FakeEngine):
  """Answers so many requests, and from then on none."""

  def __init__(self, requests: int):
    super().__init__(delay=0.003)
    self._left = requests

  async def generate(self, request_id, token_ids, sampling):
    self._left -= 1
    self.delay = 0.003 if self._left >= 0 else 1e6
    return await super().generate(request_id, token_ids, sampling)


def _work(pipe: Connection, places: Places, requests: int) -> None:
  async def main() -> None:
    shared = world(lambda: Slow(turns=2), Stalls(requests), FarQueue(pipe))
    await EnvWorker(shared, places, {'max_steps': 2}).run({'seed': 5})

  asyncio.run(main())


class FarWorker:
  """Plays `places` of `queue` until it has no more, or is killed.

  requests: how many its engine answers.
  """

  def __init__(self, queue: Any, places: Places, requests: int = 1_000_000):
    self._queue = queue
    self._pipe, theirs = _SPAWN.Pipe()
    self.process = _SPAWN.Process(
      target=_work, args=(theirs, places, requests), daemon=True
    )
    self.process.start()
    theirs.close()
    self._loop = asyncio.get_running_loop()
    self._loop.add_reader(self._pipe.fileno(), self._hear)
    self._tasks: set[asyncio.Task] = set()

  def _hear(self) -> None:
    try:
      number, method, args = self._pipe.recv()
    except (EOFError, OSError):  # it has ended; what it waits for, the queue still does
      self._loop.remove_reader(self._pipe.fileno())
      return
    task = self._loop.create_task(self._answer(number, method, args))
    self._tasks.add(task)
    task.add_done_callback(self._tasks.discard)

  async def _answer(self, number: int, method: str, args: tuple[Any, ...]) -> None:
    answer = await getattr(self._queue, method)(*args)
    with contextlib.suppress(OSError):
      self._pipe.send((number, answer))

  async def end(self) -> int | None:
    """Waits for its end, and lets go of everything; its exit code."""
    await asyncio.to_thread(self.process.join, 30)
    self.process.kill()
    self._loop.remove_reader(self._pipe.fileno())
    for task in self._tasks:
      task.cancel()
    self._pipe.close()
    return self.process.exitcode
