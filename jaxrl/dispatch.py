"""One thread per set of devices: who may use them, in turn.

The learner and an in-process engine share devices. Each hands its device work to the
same `Dispatcher`, which runs it in order on one thread, so that neither waits inside
the event loop and no decode dispatch is begun within a train step. On one CPU device
one that was begun before may still run beside it (`jaxrl.rollout.lanes`).
"""

import asyncio
import concurrent.futures
import functools
from collections.abc import Callable
from typing import TypeVar

R = TypeVar('R')


class Dispatcher:
  """Runs functions one at a time, first come first served, off the event loop."""

  def __init__(self, name: str = 'devices'):
    self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=name)

  async def run(self, fn: Callable[..., R], *args, **kwargs) -> R:
    """Awaits `fn(*args, **kwargs)`, run on the device thread. Re-raises its error."""
    loop = asyncio.get_running_loop()
    call = functools.partial(fn, *args, **kwargs)
    return await loop.run_in_executor(self._executor, call)

  def close(self) -> None:
    """Waits for the work at hand; later calls to `run` raise RuntimeError."""
    self._executor.shutdown(wait=True)
