"""Weights that go from the learner's GPUs into the engines', and nowhere else.

The learner sends a version to all engines at once, and each answers with the digest of
what it was handed. There is nothing to fetch later: a new engine is sent the newest.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxrl.rollout.handles import EngineGone, settle
from jaxrl.rollout.weights.errors import WeightsError
from jaxrl.types import Params

log = logging.getLogger(__name__)
# Calls a method of every engine, each with its own arguments; waits for all results.
Ask = Callable[[Sequence[Any], str, Sequence[tuple[Any, ...]]], list[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sending:
  """dtype: floating-point arrays are cast to it; None keeps each one's own.
  buffer_bytes: so much is sent at once, or the largest tensor where that is more.
  """

  dtype: str | None = None
  buffer_bytes: int = 256 << 20


@dataclasses.dataclass(frozen=True)
class Target:
  """An engine that is sent to. engine: its handle, with `key()`, by which one process
  is told from the next. gpus: of which it has so many. places: which of the sender's
  GPUs these are, where both have the same.
  """

  engine: Any
  gpus: int = 1
  places: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Sent:
  """version: that was sent. digest: of the tensors as they left. held: of those that
  each engine was handed. bytes: of the tensors.
  """

  version: int
  digest: str
  held: tuple[str, ...]
  bytes: int


class Pushes(Protocol):
  """Parameters that can be sent, where they are."""

  async def push(
    self, version: int | None, targets: Sequence[Target], backend: str, sending: Sending
  ) -> Sent:
    """version: None for whatever the newest is by then. backend: 'ipc' or 'nccl'."""
    ...


class DirectWeights:
  """A `WeightStore` whose versions are sent to engines, by `Pushes`.

  backend, sending: by which, and how. patience: seconds that a version may take. lost:
  what is raised for an engine that is lost while a version is sent. One that is gone
  before is left to whoever looks after engines, who then asks for `catch_up`.
  """

  def __init__(
    self,
    targets: Sequence[Target],
    backend: str,
    sending: Sending,
    *,
    patience: float = 600.0,
    lost: Callable[[str], Exception] = WeightsError,
  ):
    self._targets, self._how = targets, (backend, sending)
    self._patience, self._lost = patience, lost
    self._turn = asyncio.Lock()
    self._newest: Any = None
    self._metrics: dict[str, float] = {}
    self.version: int | None = None

  async def publish(self, version: int, params: Any) -> None:
    """Sends `params`; every living engine serves them when this returns.

    Raises ValueError unless `version` rises, WeightsError when an engine was handed
    other tensors than were sent, twice, or when it takes too long.
    """
    async with self._turn:
      if self.version is not None and version <= self.version:
        raise ValueError(
          f'weights version {version} was published after version {self.version}; '
          'versions must rise'
        )
      begun = time.perf_counter()
      self._newest, self.version = params, version
      sent = await self._send(version, range(len(self._targets)))
      self._metrics = {
        'weights/bytes': float(sent.bytes if sent else 0),
        'weights/share': 1.0,
        'weights/pull_s': time.perf_counter() - begun,
      }

  async def catch_up(self, engine: Any, name: str) -> None:
    """Sends the newest weights, of which there are some, to an engine made since.

    Where the learner has learned since it published, these are a newer version.
    """
    async with self._turn:
      if self._newest is not None:
        numbers = [i for i, t in enumerate(self._targets) if t.engine is engine]
        await self._send(None, numbers)

  async def fetch(self, newer_than: int = -1) -> tuple[int, Params]:
    raise WeightsError('weights that go from GPU to GPU are kept nowhere to be fetched')

  def metrics(self) -> dict[str, float]:
    """What the newest version took; {} before the first."""
    return self._metrics

  async def close(self) -> None:
    """The learner closes its own end."""

  async def _send(self, version: int | None, numbers: Sequence[int]) -> Sent | None:
    lives = await asyncio.gather(*(self._lives(number) for number in numbers))
    living = [number for number, up in zip(numbers, lives, strict=True) if up]
    if not living:
      return None
    targets = [self._targets[number] for number in living]
    sent = await self._one(version, targets)
    if set(sent.held) != {sent.digest}:
      sent = await self._one(version, targets)
    for number, held in zip(living, sent.held, strict=True):
      if held != sent.digest:
        raise WeightsError(
          f'engine {number + 1} of {len(self._targets)} was handed other weights than '
          f'were sent, twice: version {sent.version}, digest {held}, where '
          f'{sent.digest} was sent'
        )
    return sent

  async def _one(self, version: int | None, targets: Sequence[Target]) -> Sent:
    pushing = self._newest.push(version, targets, *self._how)
    try:
      return await asyncio.wait_for(pushing, self._patience)
    except TimeoutError:
      reason = f'not all engines had it within {self._patience:g} s'
    except EngineGone as error:
      reason = str(error)
    raise self._lost(
      'an engine was lost while weights were sent to it, and with it the way to the '
      f'others; the same command resumes from the last checkpoint ({reason})'
    )

  async def _lives(self, number: int) -> bool:
    """Whether an engine answers, before others wait for it."""
    try:
      await settle(self._targets[number].engine.health(self._patience))
    except EngineGone:
      told = 'engine %d of %d gets no weights: it is gone'
      log.warning(told, number + 1, len(self._targets))
      return False
    return True


def asker(loop: asyncio.AbstractEventLoop) -> Ask:
  """Asks from a thread, by way of the event loop in which the handles work."""

  def ask(
    engines: Sequence[Any], name: str, arguments: Sequence[tuple[Any, ...]]
  ) -> list[Any]:
    async def all_() -> list[Any]:
      calls = (
        settle(getattr(engine, name)(*own))
        for engine, own in zip(engines, arguments, strict=True)
      )
      return await asyncio.gather(*calls)

    return asyncio.run_coroutine_threadsafe(all_(), loop).result()

  return ask
