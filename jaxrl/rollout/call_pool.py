"""A bounded pool of threads for environment code, which outlives a hung call.

Environment code never runs on the event loop. A thread that does not return in time
is given up and replaced, so the pool keeps its width; threads are daemons, so a hung
one never keeps the process from ending.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any


class CallTimeout(Exception):
  """A call ran longer than it may."""


class _Call:
  __slots__ = ('begun', 'finished', 'fn', 'future', 'loop', 'lost')

  def __init__(self, fn: Callable[[], Any], loop: asyncio.AbstractEventLoop):
    self.fn, self.loop, self.future = fn, loop, loop.create_future()
    self.begun: float | None = None  # when a thread took it up
    self.finished = False  # its thread is free again
    self.lost = False  # given up: its thread has been replaced


THREADS = 8


class CallPool:
  """Runs plain functions in at most `num_threads` threads."""

  def __init__(self, num_threads: int = THREADS):
    if num_threads < 1:
      raise ValueError(f'a pool needs at least one thread, not {num_threads}')
    self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
    self._width = num_threads
    self._lock = threading.Lock()
    self._closed = False
    self.replaced = 0  # threads given up since the start
    for _ in range(num_threads):
      self._start_thread()

  def _start_thread(self) -> None:
    threading.Thread(target=self._work, name='env-call', daemon=True).start()

  async def run(
    self, fn: Callable[..., Any], *args: Any, timeout: float | None = None
  ) -> Any:
    """Awaits `fn(*args)`; raises CallTimeout `timeout` seconds after it began."""
    if self._closed:
      raise RuntimeError('the pool of environment threads is closed')
    loop = asyncio.get_running_loop()
    call = _Call(lambda: fn(*args), loop)
    timer = loop.call_later(timeout, self._check, call, timeout) if timeout else None
    self._calls.put(call)
    try:
      return await call.future
    finally:  # the timer of a call no one awaits any more still guards its thread
      if timer is not None and not call.future.cancelled():
        timer.cancel()

  def _check(self, call: _Call, timeout: float) -> None:
    """Gives a call up if it has run too long; one that still waits has not begun."""
    left = timeout if call.begun is None else call.begun + timeout - time.monotonic()
    with self._lock:
      if call.finished:
        return
      if left > 0:
        call.loop.call_later(left, self._check, call, timeout)
        return
      call.lost = True
      self.replaced += 1
    self._start_thread()
    _deliver(call.future, None, CallTimeout(f'no answer within {timeout:g} s'))

  def _work(self) -> None:
    while (call := self._calls.get()) is not None:
      if call.future.cancelled():
        call.finished = True
        continue
      call.begun = time.monotonic()
      try:
        outcome, error = call.fn(), None
      except BaseException as raised:  # even SystemExit costs one call, no more
        outcome, error = None, raised
      with self._lock:
        call.finished = True
        if call.lost:
          return  # another thread has this one's place
      with contextlib.suppress(RuntimeError):  # the loop has closed: no one waits
        call.loop.call_soon_threadsafe(_deliver, call.future, outcome, error)
      call = outcome = error = None  # hold nothing while waiting for the next

  def close(self) -> None:
    """Lets the threads end; calls that are running are not waited for."""
    self._closed = True
    for _ in range(self._width):
      self._calls.put(None)


def _deliver(future: asyncio.Future, outcome: Any, error: BaseException | None):
  if future.done():
    return
  if error is None:
    future.set_result(outcome)
  elif isinstance(error, Exception) and not isinstance(error, StopIteration):
    future.set_exception(error)
  else:  # what asyncio would not carry, or would end the loop with
    future.set_exception(RuntimeError(f'environment code raised {error!r}'))
