"""The reader registry tells a publisher what its readers read and what they miss.

Every reader keeps a status record beside the blobs. It is written anew while a version
is read; a record that stays the same for too long belongs to a dead reader.
"""

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Sequence

from jaxrl.rollout.weights.manifest import ChunkIndex, decode_record, encode_record
from jaxrl.rollout.weights.transport import CorruptWeightsError, Transport


@dataclasses.dataclass(frozen=True)
class ReaderStatus:
  """What a reader says of itself.

  Attributes:
    beat: Increases with every record.
    writer: Id of the writer whose version is being read.
    reading: Version being read, None between two; older versions must not be freed.
    num_reports: Increases with every failure to read a version; 0 for none.
    missing_chunks: Chunks of the version that stayed missing or corrupt.
    manifest_missing: Whether a manifest stayed missing or corrupt.
  """

  beat: int = 0
  writer: str = ''
  reading: int | None = None
  num_reports: int = 0
  missing_chunks: tuple[ChunkIndex, ...] = ()
  manifest_missing: bool = False


class ReaderHeartbeat:
  """A reader's end of the registry; a reader has one for each part of a version.

  Attributes:
    number: A random number that identifies the reader.
  """

  def __init__(self, transport: Transport, part: int):
    self._transport = transport
    self.number = secrets.randbits(64)
    self._name = f'{_status_prefix(part)}{self.number:016x}'
    self._status = ReaderStatus()

  def start_reading(self, writer: str, version: int) -> None:
    """Says that a version is being read. What was reported missing of it stays so."""
    status = self._status
    if (status.writer, status.reading) != (writer, version):
      status = ReaderStatus(status.beat)
    self._write(dataclasses.replace(status, writer=writer, reading=version))

  def beat(self) -> None:
    """Shows that the reader is alive."""
    self._write(self._status)

  def report_missing(
    self, chunks: Sequence[ChunkIndex] = (), *, manifest: bool = False
  ) -> None:
    """Says that the version cannot be read as it is.

    Args:
      chunks: The chunks that are missing or corrupt.
      manifest: Whether a manifest is.
    """
    self._write(
      dataclasses.replace(
        self._status,
        num_reports=self._status.num_reports + 1,
        missing_chunks=tuple(chunks),
        manifest_missing=manifest,
      )
    )

  def finish_reading(self) -> None:
    """Says that the version has been read."""
    self._write(ReaderStatus(self._status.beat, self._status.writer))

  def leave(self) -> None:
    """Removes the reader from the registry."""
    self._transport.delete(self._name)

  def _write(self, status: ReaderStatus) -> None:
    self._status = dataclasses.replace(status, beat=status.beat + 1)
    self._transport.put(self._name, encode_record(dataclasses.asdict(self._status)))


class ReaderRegistry:
  """The publisher's end of the registry.

  Args:
    transport: Where the records are.
    part: Number of the publisher's part of a version.
    patience: Seconds after which a record that does not change is removed.
  """

  def __init__(self, transport: Transport, part: int, patience: float):
    self._transport = transport
    self._prefix = _status_prefix(part)
    self._patience = patience
    self._last_seen: dict[str, tuple[float, bytes]] = {}
    self._answered: dict[str, int] = {}

  def living_readers(self) -> dict[str, ReaderStatus]:
    """Returns the statuses of the living readers by name."""
    now, statuses, last_seen = time.monotonic(), {}, {}
    for name in self._transport.names(self._prefix):
      with contextlib.suppress(KeyError, CorruptWeightsError, TypeError):
        data = bytes(self._transport.get(name))
        since, old_data = self._last_seen.get(name, (now, data))
        if data != old_data:
          since = now
        if now - since > self._patience:
          self._transport.delete(name)
          continue
        last_seen[name] = since, data
        statuses[name] = ReaderStatus(**decode_record(data))
    self._last_seen = last_seen
    self._answered = {n: count for n, count in self._answered.items() if n in statuses}
    return statuses

  def new_reports(self) -> list[ReaderStatus]:
    """Returns the statuses that report something missing, each report once."""
    reports = []
    for name, status in self.living_readers().items():
      if self._answered.get(name, 0) != status.num_reports:
        self._answered[name] = status.num_reports
        if status.num_reports:
          reports.append(status)
    return reports


def _status_prefix(part: int) -> str:
  return f'{part}-reader-'
