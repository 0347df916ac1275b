"""Device thread: runs all work for one set of devices in order, off the event loop.

The learner and an in-process engine share devices. Both hand their device work to the
same `DeviceThread`, which runs it in order on one thread. Neither blocks the event
loop, and no decode dispatch starts in the middle of a train step. On a single CPU
device, a decode dispatch that started earlier may still run beside a train step (see
`jaxrl.rollout.engine.threaded_decode`).
"""

import asyncio
import concurrent.futures
import contextlib
import ctypes
import functools
import os
from collections.abc import Callable
from typing import TypeVar

R = TypeVar('R')


class DeviceThread:
  """Runs functions one at a time, in the order of their arrival, on its own thread."""

  def __init__(self, name: str = 'devices'):
    """Starts no thread yet; the first call to `run` does.

    Args:
      name: Prefix of the thread's name.
    """
    self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=name)

  async def run(self, fn: Callable[..., R], *args, **kwargs) -> R:
    """Runs `fn(*args, **kwargs)` on the device thread and waits for its result.

    Args:
      fn: The function to run. It must not be a coroutine function.
      *args: Positional arguments for `fn`.
      **kwargs: Keyword arguments for `fn`.

    Returns:
      What `fn` returns.

    Raises:
      RuntimeError: If the thread has been closed.
      Exception: Whatever `fn` raises.
    """
    loop = asyncio.get_running_loop()
    call = functools.partial(fn, *args, **kwargs)
    return await loop.run_in_executor(self._executor, call)

  def close(self) -> None:
    """Waits for the work that was submitted; later calls to `run` raise."""
    self._executor.shutdown(wait=True)


def cpu_count() -> int:
  """Returns the number of CPU cores that this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def trim_heap() -> None:
  """Gives memory that was freed back to the system, where glibc has it.

  After a program was compiled, some hundred MiB lie between blocks that are still used.
  """
  with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
    ctypes.CDLL(None).malloc_trim(0)
