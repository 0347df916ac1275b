"""The parameters of a learner whose processes are elsewhere, and their broadcast."""

import asyncio
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl.rollout.weights.broadcast import ReceivedWeights
from jaxrl.rollout.weights.direct import Sending, Sent, Target
from jaxrl.rollout.weights.transport import Transport
from jaxrl.types import Params
from launch.weights import Plan

Metrics = dict[str, float]
Connect = Callable[[], Transport]
_TICKETS = itertools.count(1)


async def together(actors: Sequence[Any], name: str, *args: Any) -> list[Any]:
  """The results of the same call to each; the first error as soon as there is one."""
  return await asyncio.gather(*(getattr(actor, name)(*args) for actor in actors))


class RemoteParams:
  """The parameters of a learner of several processes: where they are, not what.

  turn: held while all processes do what none can do alone, so that they do it in one
  order. ticket: of a copy that they hold; 0 for what is newest when it is published.
  """

  def __init__(self, actors: Sequence[Any], turn: asyncio.Lock, ticket: int = 0):
    self._actors, self._turn, self._ticket = actors, turn, ticket
    self._copies: weakref.WeakSet[RemoteParams] = weakref.WeakSet()

  async def hold(self) -> 'RemoteParams':
    """A copy that lasts while the learner goes on.

    Copies to which nobody here holds on any more are let go of first.
    """
    copy = RemoteParams(self._actors, self._turn, next(_TICKETS))
    wanted = sorted(other._ticket for other in self._copies)
    self._copies.add(copy)
    await together(self._actors, 'hold', copy._ticket, wanted)
    return copy

  async def publish(
    self, version: int, connect: Connect, plan: Plan
  ) -> list[tuple[str, Metrics]]:
    """Has each process publish its part. connect: makes its end of the transport."""
    return await together(self._actors, 'publish', version, connect, plan, self._ticket)

  async def push(
    self, version: int | None, targets: Sequence[Target], backend: str, sending: Sending
  ) -> Sent:
    """Has the processes send them to engines, between two updates."""
    async with self._turn:
      own = version, targets, backend, sending, self._ticket
      return (await together(self._actors, 'push', *own))[0]


class RemoteBroadcast:
  """Stands for the `BroadcastWeights` of every process of a learner.

  plan: of `cluster.weights`. connect: makes an end of the transport, in any process.
  parts: how many processes.
  """

  def __init__(self, plan: Plan, connect: Connect, *, parts: int):
    self._plan, self._connect, self._parts = plan, connect, parts
    self._found: list[tuple[str, Metrics]] = []
    self._own: ReceivedWeights | None = None
    self.version: int | None = None

  async def publish(self, version: int, params: RemoteParams) -> None:
    self._found = await params.publish(version, self._connect, self._plan)
    self.version = version

  async def whole_digest(self) -> str:
    """Of the newest version, those of all parts, as `Puller.pull` has them."""
    return '-'.join(digest for digest, _ in self._found)

  def metrics(self) -> Metrics:
    """What the newest version took: bytes of all parts, and the most of the rest."""
    total: Metrics = {}
    for _, metrics in self._found:
      for name, value in metrics.items():
        add = name == 'weights/bytes'
        old = total.get(name, 0.0)
        total[name] = old + value if add else max(old, value)
    return total

  async def fetch(self, newer_than: int = -1) -> tuple[int, Params]:
    """As an engine would have them: through the transport."""
    if self._own is None:
      self._own = ReceivedWeights(self._connect(), parts=self._parts)
    return await self._own.fetch(newer_than)

  async def close(self) -> None:
    """The processes close their own ends."""
    if self._own is not None:
      self._own.close()
