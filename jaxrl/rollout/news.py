"""News of leases given up, for the workers who play them."""

import asyncio

from jaxrl.rollout.group import Lease

_KEPT = 4096
Item = tuple[int, int, Lease]  # group_id, env_id, the lease


class News:
  """A list that grows and is waited for; the oldest items are forgotten in time."""

  def __init__(self):
    self._items: list[Item] = []
    self._gone = 0  # how many have been forgotten
    self._came = asyncio.Event()

  def tell(self, item: Item) -> None:
    self._items.append(item)
    surplus = len(self._items) - _KEPT
    if surplus > 0:
      del self._items[:surplus]
      self._gone += surplus
    self._came.set()

  async def wait(self, after: int) -> tuple[int, list[Item]]:
    """Waits for items since `after`, which starts at 0; the next `after`, and them."""
    while self._gone + len(self._items) <= after:
      self._came.clear()
      await self._came.wait()
    start = max(after - self._gone, 0)
    return self._gone + len(self._items), self._items[start:]
