"""Thread pool: runs environment code with time limits, off the event loop.

Environment code never runs on the event loop. A thread whose call does not return in
time is abandoned and replaced, so the pool keeps its size. Threads are daemons, so a
call that hangs does not keep the process from ending. After a call, the process has the
standard streams that it had before.
"""

import asyncio
import contextlib
import dataclasses
import functools
import io
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar, TypeVarTuple

from jaxrl.options import Options, option
from jaxrl.user_code import describe_error

DEFAULT_NUM_THREADS = 8
Arguments = TypeVarTuple('Arguments')
Value = TypeVar('Value')


@dataclasses.dataclass(frozen=True)
class Timeouts(Options):
  """Seconds before a call of an environment or of the engine is cancelled."""

  reset: float = option(
    60.0, "Seconds that an environment's reset may take; 0 for no limit.", low=0
  )
  step: float = option(
    60.0, "Seconds that an environment's step may take; 0 for no limit.", low=0
  )
  generate: float = option(
    0.0, 'Seconds that one reply of the engine may take; 0 for no limit.', low=0
  )


class CallTimeoutError(Exception):
  """A call ran longer than its time limit."""


class _StandardStreams:
  """Gives the process back the standard streams that calls close or replace."""

  _STREAMS: ClassVar = {'stdout': 1, 'stderr': 2}

  def __init__(self):
    self._lock = threading.Lock()
    self._running: list[ThreadPool] = []  # the pool of each call, unless it is closed
    self._thread = threading.local()
    self._streams: dict[str, Any] = {}
    self._copies: dict[int, int] = {}
    for number in (0, 1, 2):
      with contextlib.suppress(OSError):  # a daemon may have none
        self._copies[number] = os.dup(number)
    self._pid = os.getpid()

  def _guard_close(self, stream: Any) -> None:
    """Makes `stream.close` do nothing in a call.

    If it was closed and replaced, a logger that holds it could not write any more.
    """
    attributes = getattr(stream, '__dict__', None)
    if attributes is None or 'close' in attributes:  # cannot be guarded, or is
      return
    close = stream.close

    def close_outside_calls() -> None:
      if not self._is_in_call():
        close()

    stream.close = close_outside_calls

  def _is_in_call(self) -> bool:
    """Returns whether this thread is in a call; False in a forked process."""
    return getattr(self._thread, 'in_call', False) and os.getpid() == self._pid

  @contextlib.contextmanager
  def guard(self, pool: 'ThreadPool') -> Iterator[None]:
    """Guards a call of `pool` that runs on this thread, while entered."""
    with self._lock:
      if not self._running:
        self._streams = {name: getattr(sys, name) for name in self._STREAMS}
        for stream in self._streams.values():
          self._guard_close(stream)
      self._running.append(pool)
    self._thread.in_call = True
    try:
      yield
    finally:
      self._thread.in_call = False
      with self._lock:
        for number, copy in self._copies.items():
          try:
            os.fstat(number)
          except OSError:  # closed
            os.dup2(copy, number)
        if pool in self._running:
          self._running.remove(pool)
          self._restore_all()

  def forget(self, pool: 'ThreadPool') -> None:
    """Restores the streams for a pool that is closed, and then ignores its calls.

    A call that still runs may end when the process has new streams, which stay.
    """
    with self._lock:
      if pool in self._running:
        self._running = [other for other in self._running if other is not pool]
        self._restore_all()

  def _restore_all(self) -> None:
    for name, number in self._STREAMS.items():
      self._restore(name, number)

  def _restore(self, name: str, number: int) -> None:
    """Repairs a stream that a call has closed or replaced.

    A stream that is merely another may be how a call that still runs reads what it
    prints, so it is replaced only once no call runs.
    """
    present, original = getattr(sys, name), self._streams[name]
    if original is None or (present is original and not _is_closed(original)):
      return
    if self._running and present is not None and not _is_closed(present):
      return
    if _is_closed(original) and number in self._copies:
      encoding = getattr(original, 'encoding', None)
      errors = getattr(original, 'errors', None)
      file = io.FileIO(number, 'w', closefd=False)
      original = io.TextIOWrapper(
        io.BufferedWriter(file), encoding, errors, line_buffering=True
      )
      self._streams[name] = original
    setattr(sys, name, original)


def _is_closed(stream: object) -> bool:
  return bool(getattr(stream, 'closed', False))


@functools.cache
def _standard_streams() -> _StandardStreams:
  return _StandardStreams()


class _PooledCall:
  """A call that is queued or running."""

  __slots__ = ('fn', 'future', 'is_abandoned', 'is_finished', 'loop', 'start')

  def __init__(self, fn: Callable[[], object], loop: asyncio.AbstractEventLoop):
    self.fn = fn
    self.loop = loop
    self.future = loop.create_future()
    self.start: float | None = None  # when a thread began it
    self.is_finished = False  # its thread is free again
    self.is_abandoned = False  # timed out: its thread has been replaced


class ThreadPool:
  """Runs plain functions on a fixed number of threads, each with a time limit.

  Attributes:
    num_replaced: Threads that have been abandoned so far because of a timeout.
  """

  def __init__(self, num_threads: int = DEFAULT_NUM_THREADS):
    """Starts the threads.

    Args:
      num_threads: Most calls that run at the same time.

    Raises:
      ValueError: If `num_threads` is less than 1.
    """
    if num_threads < 1:
      raise ValueError(f'a pool needs at least one thread, not {num_threads}')
    self._streams = _standard_streams()
    self._calls: queue.SimpleQueue[_PooledCall | None] = queue.SimpleQueue()
    self._num_threads = num_threads
    self._lock = threading.Lock()
    self._is_closed = False
    self.num_replaced = 0
    for _ in range(num_threads):
      self._start_thread()

  def _start_thread(self) -> None:
    threading.Thread(target=self._work, name='env-call', daemon=True).start()

  async def run(
    self,
    fn: Callable[[*Arguments], Value],
    *args: *Arguments,
    timeout: float | None = None,
  ) -> Value:
    """Runs `fn(*args)` on a thread of the pool and waits for its result.

    Args:
      fn: The function to run.
      *args: Its arguments.
      timeout: Time limit in seconds, counted from when a thread begins the call; None
        or 0 for no limit.

    Returns:
      What `fn` returns.

    Raises:
      CallTimeoutError: If the call runs too long.
      RuntimeError: If the pool is closed, or if `fn` raises something that asyncio
        cannot pass on.
      Exception: Whatever else `fn` raises.
    """
    if self._is_closed:
      raise RuntimeError('the pool of environment threads is closed')
    loop = asyncio.get_running_loop()
    pooled_call = _PooledCall(lambda: fn(*args), loop)
    timer = None
    if timeout:
      timer = loop.call_later(timeout, self._check_timeout, pooled_call, timeout)
    self._calls.put(pooled_call)
    try:
      return await pooled_call.future
    finally:  # the timer of a cancelled call still watches its thread
      if timer is not None and not pooled_call.future.cancelled():
        timer.cancel()

  def _check_timeout(self, pooled_call: _PooledCall, timeout: float) -> None:
    """Abandons a call that has run too long; looks again later at any other."""
    seconds_left = timeout  # of a call that no thread has begun
    if pooled_call.start is not None:
      seconds_left = pooled_call.start + timeout - time.monotonic()
    with self._lock:
      if pooled_call.is_finished:
        return
      if seconds_left > 0:
        pooled_call.loop.call_later(
          seconds_left, self._check_timeout, pooled_call, timeout
        )
        return
      pooled_call.is_abandoned = True
      self.num_replaced += 1
    self._start_thread()
    error = CallTimeoutError(f'no answer within {timeout:g} s')
    _resolve(pooled_call.future, None, error)

  def _work(self) -> None:
    """Runs calls until the pool is closed or this thread is abandoned."""
    while (pooled_call := self._calls.get()) is not None:
      if pooled_call.future.cancelled():
        pooled_call.is_finished = True
        continue
      pooled_call.start = time.monotonic()
      try:
        with self._streams.guard(self):
          result, error = pooled_call.fn(), None
      except BaseException as raised:  # even SystemExit only ends this call
        result, error = None, raised
      with self._lock:
        pooled_call.is_finished = True
        if pooled_call.is_abandoned:
          return  # another thread has taken this one's place
      with contextlib.suppress(RuntimeError):  # the loop is closed: no one waits
        future = pooled_call.future
        pooled_call.loop.call_soon_threadsafe(_resolve, future, result, error)
      pooled_call = result = error = future = None  # keep nothing alive while idle

  def close(self) -> None:
    """Ends the threads, without waiting for calls that are running."""
    self._is_closed = True
    for _ in range(self._num_threads):
      self._calls.put(None)
    self._streams.forget(self)


def _resolve(
  future: asyncio.Future, result: object, error: BaseException | None
) -> None:
  if future.done():
    return
  if error is None:
    future.set_result(result)
  elif isinstance(error, Exception) and not isinstance(error, StopIteration):
    future.set_exception(error)
  else:  # asyncio cannot carry it, or it would end the event loop
    future.set_exception(
      RuntimeError(f'environment code raised {describe_error(error)}')
    )
