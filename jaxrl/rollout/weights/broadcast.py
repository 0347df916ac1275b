"""The two ends of a broadcast as the loop and the engines know them: awaited."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.dispatch import Dispatcher
from jaxrl.rollout.weights.changes import Changes
from jaxrl.rollout.weights.errors import WeightsError
from jaxrl.rollout.weights.frozen import Frozen
from jaxrl.rollout.weights.layout import Window
from jaxrl.rollout.weights.publisher import Publisher, Report
from jaxrl.rollout.weights.receiver import Receiver
from jaxrl.rollout.weights.source import Source
from jaxrl.rollout.weights.transport import Transport
from jaxrl.types import Params, RolloutEngine

log = logging.getLogger(__name__)
TEND = 0.05  # seconds between two looks at what receivers miss
POLL = 0.01  # seconds between two looks for a newer version
SLOW = 60.0  # seconds that the other processes of a learner may be behind


def on_device(params: Params) -> Params:
  """Copies on JAX's first device, ready when this returns."""
  return jax.block_until_ready(jax.tree.map(lambda x: jnp.array(x, copy=True), params))


class ReceivedWeights:
  """The engines' end: `fetch` as in `WeightStore`.

  place: makes of the host's arrays what `fetch` returns; by default, copies on JAX's
  first device. None: the host's arrays themselves, which last as `Receiver` says.
  patience: seconds that weights may stay incomplete before `fetch` gives up. parts,
  windows: as for `Receiver`.
  """

  def __init__(
    self,
    transport: Transport,
    *,
    parts: int = 1,
    windows: Mapping[str, Window] | None = None,
    place: Callable[[Params], Params] | None = on_device,
    patience: float = 60.0,
  ):
    self.receiver = Receiver(transport, parts=parts, windows=windows)
    self._place, self._patience = place, patience
    self._given: list[str] = []

  async def fetch(
    self, newer_than: int = -1, *, published: bool = False
  ) -> tuple[int, Params]:
    """Waits for a version past `newer_than`, or for the first of a new learner.

    published: there is one, and not to find it is an error too. Raises WeightsError
    when there are such weights but cannot be had whole.
    """
    await self._wait(newer_than, published)
    taken = await asyncio.to_thread(self.receiver.take, self._place)
    self._given, version, params = taken
    return version, params

  def close(self) -> None:
    self.receiver.close()

  async def _wait(self, newer_than: int, published: bool) -> None:
    began: float | None = None
    absent = time.monotonic()
    while True:
      await asyncio.to_thread(self.receiver.poll)
      problem, now = self.receiver.problem, time.monotonic()
      if problem is None:
        began, version = None, self.receiver.version
        restarted = bool(self._given) and self.receiver.runs != self._given
        if version is not None and (version > newer_than or restarted):
          return
        if published and now - absent > self._patience:
          raise WeightsError(
            f'no version after {newer_than} was found for {self._patience:g} s, though '
            'one was published: learner and engine may not see the same place '
            f'(cluster.weights; {socket.gethostname()} found {version})'
          )
        await asyncio.sleep(POLL)
        continue
      absent = now
      began = now if began is None else began
      if now - began > self._patience:
        raise WeightsError(
          f'weights stayed incomplete for {self._patience:g} s: {problem}'
        ) from problem
      await asyncio.sleep(TEND)


class BroadcastWeights:
  """A `WeightStore` whose engines live in other processes.

  They hold a `ReceivedWeights` each, on the same transport. dtype: floating-point
  arrays are cast to it; None keeps each one's own. on_device: what changed is found
  there, by `Changes`, and only that comes to the host; one more copy stays on the
  devices. parts, part: processes of the learner, and which this is. tend: seconds
  between two looks at what receivers miss. options: as for `Publisher`.
  """

  def __init__(
    self,
    transport: Transport,
    *,
    dispatcher: Dispatcher,
    dtype: str | None = None,
    on_device: bool = False,
    part: int = 0,
    parts: int = 1,
    tend: float = TEND,
    **options: Any,
  ):
    self._dispatcher = dispatcher
    self._snapshot = (Changes if on_device else Frozen)(dtype).snapshot
    self._publisher = Publisher(transport, part=part, **options)
    self._transport, self._part, self._parts = transport, part, parts
    self._pause = tend
    self._own: ReceivedWeights | None = None
    self._tending: asyncio.Task[None] | None = None
    self.report: Report | None = None

  @property
  def version(self) -> int | None:
    """The newest version; None before the first."""
    return self._publisher.version

  @property
  def digest(self) -> str:
    """Of the newest version, this process's part of it."""
    return self._publisher.digest

  async def publish(self, version: int, params: Params) -> None:
    """Makes `params` the newest version; they may be donated when this returns.

    Only the copy to the host takes the device thread's time. Waits for receivers that
    still read what must be freed. Raises ValueError unless `version` rises.
    """
    shards = await self._dispatcher.run(self._snapshot, params)
    self.report = await asyncio.to_thread(self._publisher.publish, version, shards)
    if self._tending is None:
      self._tending = asyncio.create_task(self._tend())

  async def whole_digest(self) -> str:
    """Of the newest version, those of all processes' parts, as `Puller.pull` has them.

    Raises WeightsError when another process does not publish it in time.
    """
    version, parts = self.version, range(self._parts)
    if version is None:
      return ''
    look = (self._digest(part, version) for part in parts)
    return '-'.join(await asyncio.gather(*look))

  def metrics(self) -> dict[str, float]:
    """What the newest version took, of this process's part; {} before the first.

    bytes: for a receiver of the version before; share: of the full bytes; changed: of
    all weights.
    """
    report = self.report
    if report is None:
      return {}
    sent = report.full_bytes if report.delta_bytes is None else report.delta_bytes
    return {
      'weights/bytes': float(sent),
      'weights/share': sent / max(report.full_bytes, 1),
      'weights/changed': report.changed / max(report.elements, 1),
      'weights/encode_s': report.encode_s,
      'weights/put_s': report.put_s,
      'weights/wait_s': report.wait_s,
    }

  async def fetch(self, newer_than: int = -1) -> tuple[int, Params]:
    """As an engine would have them: through the transport."""
    if self._own is None:
      self._own = ReceivedWeights(self._transport, parts=self._parts)
    return await self._own.fetch(newer_than)

  async def close(self) -> None:
    """Ends the service. The transport is the caller's to close."""
    if self._tending is not None:
      self._tending.cancel()
      await asyncio.gather(self._tending, return_exceptions=True)
    if self._own is not None:
      self._own.close()
    self._publisher.close()

  async def _digest(self, part: int, version: int) -> str:
    if part == self._part:
      return self.digest
    source, begun = Source(self._transport, part, tries=3), time.monotonic()
    while time.monotonic() - begun < SLOW:
      head = await asyncio.to_thread(source.head)
      if head is not None and head[1] >= version:
        manifest = await asyncio.to_thread(source.manifest, head[0], version)
        return manifest.digest
      await asyncio.sleep(POLL)
    raise WeightsError(
      f'process {part} of the learner has not published version {version} within '
      f'{SLOW:g} s'
    )

  async def _tend(self) -> None:
    while True:
      await asyncio.sleep(self._pause)
      try:
        await asyncio.to_thread(self._publisher.tend)
      except WeightsError as error:
        log.warning('weights could not be sent again: %s', error)


async def follow(engine: RolloutEngine, weights: ReceivedWeights) -> None:
  """Has `engine` serve every new version, until cancelled."""
  version = -1
  while True:
    version, params = await weights.fetch(version)
    await engine.load(version, params)
