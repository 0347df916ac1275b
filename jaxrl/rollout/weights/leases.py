"""What receivers tell the publisher: what they read, and what they miss.

A record lies beside the blobs under the receiver's name. It is written anew while a
version is read; one that stays the same for too long is a dead receiver's.
"""

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Callable, Sequence

from jaxrl.rollout.weights.errors import Corrupt
from jaxrl.rollout.weights.transport import Transport
from jaxrl.rollout.weights.wire import frame, unframe

Miss = tuple[int, int]  # a region's number in its manifest, a chunk's number in it


@dataclasses.dataclass(frozen=True)
class Record:
  """beat: rises with every record. run: of the publisher that is read. reading: the
  version, None between two; it and all before it are to stay. complaint: rises with
  every failure to get it, 0 for none; misses: its chunks that stayed missing or
  corrupt; manifest: whether a manifest did.
  """

  beat: int = 0
  run: str = ''
  reading: int | None = None
  complaint: int = 0
  misses: tuple[Miss, ...] = ()
  manifest: bool = False


class Lease:
  """A receiver's end. One for each part of the publisher."""

  def __init__(self, transport: Transport, part: int):
    self._transport = transport
    self.number = secrets.randbits(64)  # by which receivers are told apart
    self._name = f'{prefix(part)}{self.number:016x}'
    self._record = Record()

  def begin(self, run: str, version: int) -> None:
    """A version is being read. What it was found to lack before still holds."""
    old = self._record
    if (old.run, old.reading) != (run, version):
      old = Record(old.beat)
    self._tell(dataclasses.replace(old, run=run, reading=version))

  def beat(self) -> None:
    """Shows that the receiver lives."""
    self._tell(self._record)

  def complain(self, misses: Sequence[Miss] = (), *, manifest: bool = False) -> None:
    """The version cannot be had as it is."""
    old = self._record
    count = old.complaint + 1
    self._tell(Record(old.beat, old.run, old.reading, count, tuple(misses), manifest))

  def done(self) -> None:
    """The version has been read."""
    self._tell(Record(self._record.beat, self._record.run))

  def _tell(self, record: Record) -> None:
    self._record = dataclasses.replace(record, beat=record.beat + 1)
    self._transport.put(self._name, frame(dataclasses.asdict(self._record)))

  def end(self) -> None:
    self._transport.delete(self._name)


class Leases:
  """The publisher's end. patience: seconds after which a silent record is removed."""

  def __init__(
    self,
    transport: Transport,
    part: int,
    patience: float,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._transport, self._prefix = transport, prefix(part)
    self._patience, self._clock = patience, clock
    self._seen: dict[str, tuple[float, bytes]] = {}
    self._answered: dict[str, int] = {}

  def read(self) -> dict[str, Record]:
    """The records of those who live, by name."""
    now, found, seen = self._clock(), {}, {}
    for name in self._transport.names(self._prefix):
      with contextlib.suppress(KeyError, Corrupt, TypeError):
        data = bytes(self._transport.get(name))
        since, before = self._seen.get(name, (now, data))
        if data != before:
          since = now
        if now - since > self._patience:
          self._transport.delete(name)
          continue
        seen[name] = since, data
        found[name] = Record(**unframe(data))
    self._seen = seen
    self._answered = {n: s for n, s in self._answered.items() if n in found}
    return found

  def complaints(self) -> list[Record]:
    """Records that complain, each complaint once."""
    new = []
    for name, record in self.read().items():
      if self._answered.get(name, 0) != record.complaint:
        self._answered[name] = record.complaint
        if record.complaint:
          new.append(record)
    return new


def prefix(part: int) -> str:
  return f'{part}-reader-'
