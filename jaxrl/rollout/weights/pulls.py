"""Versions that engines load when they are told to: the call says which, the transport
brings it, and the digest of what was loaded comes back.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from jaxrl.rollout.handles import EngineGone, settle
from jaxrl.rollout.weights.broadcast import BroadcastWeights, ReceivedWeights
from jaxrl.rollout.weights.errors import WeightsError
from jaxrl.rollout.weights.transport import Transport
from jaxrl.types import Params

log = logging.getLogger(__name__)


class Puller:
  """An engine's end. load: the engine's own. options: as for `ReceivedWeights`."""

  def __init__(
    self,
    transport: Transport,
    load: Callable[[int, Params], Awaitable[None]],
    **options: Any,
  ):
    self._transport, self._load, self._options = transport, load, options
    self._received = ReceivedWeights(transport, **options)
    self._turn = asyncio.Lock()

  async def pull(self, version: int, *, full: bool = False) -> str:
    """Loads the newest version, which is `version` or one after it.

    full: forgets the version held, so that all bytes come anew. Returns the digest of
    the arrays handed to the engine, taken from those arrays; what is not as it was
    published is not handed on. Raises WeightsError when it cannot be had whole.
    """
    async with self._turn:
      if full:
        await asyncio.to_thread(self._received.close)
        self._received = ReceivedWeights(self._transport, **self._options)
      receiver = self._received.receiver
      number, params = await self._received.fetch(version - 1, published=True)
      found = await asyncio.to_thread(receiver.digest_of, params)
      if found == receiver.digests:
        await self._load(number, params)
      return '-'.join(found)

  def close(self) -> None:
    self._received.close()


class Pulls:
  """The learner's end: has engines load a version, and compares what they hold.

  engines: objects with a `pull` as `Puller` has it, or handles of such; read anew for
  every version, so whoever replaces one in the list is heeded. One that raises
  `EngineGone` is left to whoever looks after engines.
  """

  def __init__(self, engines: Sequence[Any]):
    self._engines = engines
    self._newest: tuple[int, str] | None = None
    self._turn = asyncio.Lock()
    self._gone: set[str] = set()  # and told of
    self.seconds = 0.0  # until every engine had the newest version

  async def load(self, version: int, digest: str) -> None:
    """Has every engine load `version`, the newest, published under `digest`.

    Raises WeightsError for an engine that holds other weights after a second, full
    load, and whatever else an engine raised that lives.
    """
    async with self._turn:
      begun = time.perf_counter()
      self._newest = version, digest
      count = len(self._engines)
      engines = {f'engine {i + 1} of {count}': e for i, e in enumerate(self._engines)}
      work = (self._one(name, engine) for name, engine in engines.items())
      results = await asyncio.gather(*work, return_exceptions=True)
      self.seconds = time.perf_counter() - begun
    for name, result in zip(engines, results, strict=True):
      if isinstance(result, EngineGone):
        if name not in self._gone:
          log.warning('%s did not get weights version %s: it is gone', name, version)
        self._gone.add(name)
      elif isinstance(result, BaseException):
        raise result
      else:
        self._gone.discard(name)

  async def catch_up(self, engine: Any, name: str) -> None:
    """Has one engine, a new one perhaps, load the newest version if there is one."""
    async with self._turn:
      if self._newest is not None:
        await self._one(name, engine)

  async def _one(self, name: str, engine: Any) -> None:
    assert self._newest is not None
    version, digest = self._newest
    held = ''
    for full in (False, True):
      held = await settle(engine.pull(version, full=full))
      if held == digest:
        return
    raise WeightsError(
      f'{name} holds other weights than were published, after loading version '
      f'{version} twice: digest {held}, where {digest} was published'
    )


class PulledWeights:
  """A `WeightStore` whose engines are told to load, and asked what they hold.

  broadcast: publishes what this process of the learner holds; other processes publish
  theirs by a `BroadcastWeights` of their own. pulls: reaches the engines.
  """

  def __init__(self, broadcast: BroadcastWeights, pulls: Pulls):
    self._broadcast, self._pulls = broadcast, pulls
    self._turn = asyncio.Lock()

  @property
  def version(self) -> int | None:
    """The newest version; None before the first."""
    return self._broadcast.version

  async def publish(self, version: int, params: Params) -> None:
    """Makes `params` the newest; every living engine has it when this returns.

    `params` may be donated then. Raises ValueError unless `version` rises, WeightsError
    when an engine's weights are not those published.
    """
    async with self._turn:
      await self._broadcast.publish(version, params)
      await self._pulls.load(version, await self._broadcast.whole_digest())

  async def fetch(self, newer_than: int = -1) -> tuple[int, Params]:
    """As an engine would have them: through the transport."""
    return await self._broadcast.fetch(newer_than)

  async def catch_up(self, engine: Any, name: str) -> None:
    """Has an engine that was started later load the newest version."""
    async with self._turn:  # else it might load what is published but not known yet
      await self._pulls.catch_up(engine, name)

  def metrics(self) -> dict[str, float]:
    """What the newest version took; {} before the first."""
    found = self._broadcast.metrics()
    return {**found, 'weights/pull_s': self._pulls.seconds} if found else {}

  async def close(self) -> None:
    """Ends the service. The transport is the caller's to close."""
    await self._broadcast.close()
