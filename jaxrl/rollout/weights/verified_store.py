"""The verified weight store publishes versions and verifies what engines have loaded.

The learner's call tells each engine which version to load. The transport brings it, and
the engine answers with the digest of the arrays that it has loaded.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from jaxrl.rollout.engine.actor_proxy import EngineDeadError, maybe_await
from jaxrl.rollout.weights.publisher import WeightPublisher
from jaxrl.rollout.weights.subscriber import WeightSubscriber
from jaxrl.rollout.weights.transport import Transport, WeightsError
from jaxrl.types import Params

log = logging.getLogger(__name__)


class EngineWeightClient:
  """An engine's end: loads versions on request.

  Args:
    transport: Where versions are written.
    load: The engine's own method, given a version and its parameters.
    **options: Options of `WeightSubscriber`.
  """

  def __init__(
    self,
    transport: Transport,
    load: Callable[[int, Params], Awaitable[None]],
    **options: Any,
  ):
    self._transport = transport
    self._load = load
    self._options = options
    self._subscriber = WeightSubscriber(transport, **options)
    self._lock = asyncio.Lock()

  async def pull(self, version: int, *, full: bool = False) -> str:
    """Loads the newest version, which is `version` or a later one.

    Args:
      version: A version that was published.
      full: Forget the version held, so that all bytes are read anew.

    Returns:
      The digest of the arrays handed to the engine, computed from those arrays. Arrays
      that are not as they were published are not handed on.

    Raises:
      WeightsError: The version cannot be read completely.
    """
    async with self._lock:
      if full:
        await asyncio.to_thread(self._subscriber.close)
        self._subscriber = WeightSubscriber(self._transport, **self._options)
      reader = self._subscriber.reader
      number, params = await self._subscriber.fetch(version - 1, published=True)
      digests = await asyncio.to_thread(reader.digests_of, params)
      if digests == reader.digests:
        await self._load(number, params)
      return '-'.join(digests)

  def close(self) -> None:
    """Leaves the reader registry."""
    self._subscriber.close()


class LoadCoordinator:
  """The learner's end: has engines load a version, and compares what they hold.

  Args:
    engines: Objects with a `pull` like `EngineWeightClient`'s, or handles of such. The
      list is read again for every version, so engines in it may be replaced. An engine
      that raises `EngineDeadError` is skipped; replacing it is up to others.

  Attributes:
    seconds: Time until every engine had the newest version.
  """

  def __init__(self, engines: Sequence[Any]):
    self._engines = engines
    self._newest: tuple[int, str] | None = None
    self._lock = asyncio.Lock()
    self._reported_dead: set[str] = set()
    self.seconds = 0.0

  async def load(self, version: int, digest: str) -> None:
    """Makes every engine load a version.

    Args:
      version: The newest version.
      digest: Its digest as published.

    Raises:
      WeightsError: An engine holds other weights after a second, full load. Other
        errors of living engines are raised as they are.
    """
    async with self._lock:
      start_time = time.perf_counter()
      self._newest = version, digest
      count = len(self._engines)
      engines = {f'engine {i + 1} of {count}': e for i, e in enumerate(self._engines)}
      loads = (self._load_engine(name, engine) for name, engine in engines.items())
      results = await asyncio.gather(*loads, return_exceptions=True)
      self.seconds = time.perf_counter() - start_time
    for name, result in zip(engines, results, strict=True):
      if isinstance(result, EngineDeadError):
        if name not in self._reported_dead:
          log.warning('%s did not get weights version %s: it is gone', name, version)
        self._reported_dead.add(name)
      elif isinstance(result, BaseException):
        raise result
      else:
        self._reported_dead.discard(name)

  async def catch_up(self, engine: Any, name: str) -> None:
    """Makes one engine, such as a new one, load the newest version if there is one."""
    async with self._lock:
      if self._newest is not None:
        await self._load_engine(name, engine)

  async def _load_engine(self, name: str, engine: Any) -> None:
    assert self._newest is not None
    version, digest = self._newest
    engine_digest = ''
    for full in (False, True):
      engine_digest = await maybe_await(engine.pull(version, full=full))
      if engine_digest == digest:
        return
    raise WeightsError(
      f'{name} holds other weights than were published, after loading version '
      f'{version} twice: digest {engine_digest}, where {digest} was published'
    )


class VerifiedWeightStore:
  """A `WeightStore` whose engines load from a transport and return a digest.

  Args:
    publisher: Publishes what this process of the learner holds. The learner's other
      processes each have a `WeightPublisher` of their own.
    coordinator: Reaches the engines.
  """

  def __init__(self, publisher: WeightPublisher, coordinator: LoadCoordinator):
    self._publisher = publisher
    self._coordinator = coordinator
    self._lock = asyncio.Lock()

  @property
  def version(self) -> int | None:
    """Returns the newest version; None before the first."""
    return self._publisher.version

  async def publish(self, version: int, params: Params) -> None:
    """Makes `params` the newest version; every living engine has it when this returns.

    Args:
      version: The number of the version; it must be greater than the one before.
      params: The parameters, which may be donated when this returns.

    Raises:
      ValueError: `version` is not greater than the newest one.
      WeightsError: An engine's weights are not those published.
    """
    async with self._lock:
      await self._publisher.publish(version, params)
      await self._coordinator.load(version, await self._publisher.combined_digest())

  async def fetch(self, newer_than: int = -1) -> tuple[int, Params]:
    """Returns (version, params) as an engine gets them: through the transport."""
    return await self._publisher.fetch(newer_than)

  async def catch_up(self, engine: Any, name: str) -> None:
    """Makes an engine that was started later load the newest version."""
    async with self._lock:  # so it cannot load a version whose digest is not known yet
      await self._coordinator.catch_up(engine, name)

  def metrics(self) -> dict[str, float]:
    """Returns what the newest version took; {} before the first."""
    published = self._publisher.metrics()
    if not published:
      return {}
    return {**published, 'weights/pull_s': self._coordinator.seconds}

  async def close(self) -> None:
    """Ends the service. The caller closes the transport."""
    await self._publisher.close()
