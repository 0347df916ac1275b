"""An event loop whose clock jumps to the next event instead of waiting for it."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class Jump(selectors.DefaultSelector):
  """now: virtual seconds since the loop was made."""

  def __init__(self):
    super().__init__()
    self.now = 0.0

  def select(self, timeout=None):
    ready = super().select(0)
    if not ready and timeout is None:
      raise RuntimeError('deadlock: nothing is scheduled and nothing will come')
    if not ready:
      self.now += timeout
    return ready


class VirtualLoop(asyncio.SelectorEventLoop):
  """For coroutines that use no thread and no socket."""

  def __init__(self):
    self.jump = Jump()
    super().__init__(self.jump)

  def time(self) -> float:
    return self.jump.now


def run(main: Coroutine[Any, Any, Any]) -> Any:
  """What `main` returns, in no more real time than its computing takes."""
  results = []

  async def kept() -> None:  # for the runner writes a task's result out, to no end
    results.append(await main)

  with asyncio.Runner(loop_factory=VirtualLoop) as runner:
    runner.run(kept())
  return results[0]
