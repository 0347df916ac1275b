"""The weight publisher writes the learner's versions into a transport.

Each version but the first is written as its difference from the one before. Readers
that are a few versions behind apply a chain of these: they are encoded once, the same
bytes for all, while the difference from each reader's own version would cost a pass
over all weights for every reader. Now and then a version is also written in full, so
that a late joiner needs one full version and a short chain.

`WeightPublisher` takes snapshots on the device thread and is awaited; it runs a
`VersionWriter`, which encodes, writes, repairs and deletes versions, in other threads.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import secrets
import threading
import time
from collections.abc import Sequence

from jaxrl import spans
from jaxrl.device_thread import DeviceThread, cpu_count
from jaxrl.options import Options, option
from jaxrl.rollout.weights.delta_encoding import (
  BaseVersion,
  EncodedChunk,
  encode_chunks,
  plan_chunks,
  write_version,
)
from jaxrl.rollout.weights.manifest import (
  RAW,
  BlobPacker,
  ChunkIndex,
  Manifest,
  blob_key,
  chunk_label,
  encode_record,
  latest_key,
  manifest_key,
  part_prefix,
  repair_key,
  writer_prefix,
)
from jaxrl.rollout.weights.manifest_reader import ManifestReader
from jaxrl.rollout.weights.reader_registry import ReaderRegistry
from jaxrl.rollout.weights.shards import Shard
from jaxrl.rollout.weights.snapshots import DeviceDeltaSnapshot, FrozenBaseSnapshot
from jaxrl.rollout.weights.subscriber import WeightSubscriber
from jaxrl.rollout.weights.transport import (
  Buffer,
  FolderOptions,
  SharedMemoryTransport,
  Transport,
  WeightsError,
)
from jaxrl.rollout.weights.weight_store import WeightStoreOptions, check_version_rises
from jaxrl.types import Params

log = logging.getLogger(__name__)

MAX_CHAIN_SHARE = 0.5  # of the full bytes, that a late joiner reads in deltas at most
PEER_POLL_INTERVAL_S = 0.01
PEER_TIMEOUT_S = 60.0  # that the other processes of a learner may be behind


@dataclasses.dataclass(frozen=True)
class PublishReport:
  """What it took to publish a version.

  Attributes:
    version: Its number.
    digest: Of its contents.
    delta_bytes: For a reader of the version before, with the manifest; None if there is
      no base.
    full_bytes: Of the weights.
    written_bytes: In total.
    num_changed: Weights that differ from the version before.
    num_elements: All weights.
    encode_s: Seconds spent on encoding.
    put_s: Seconds spent on handing bytes to the transport.
    wait_s: Seconds spent on waiting for slow readers.
  """

  version: int
  digest: str
  delta_bytes: int | None
  full_bytes: int
  written_bytes: int
  num_changed: int
  num_elements: int
  encode_s: float
  put_s: float
  wait_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class VersionWriterOptions(Options):
  """How versions are encoded, and how long they are kept."""

  keep: int = option(
    2,
    'Number of newest versions that are kept, beside the newest full one and all after '
    'it.',
    low=1,
  )
  chunk_bytes: int = option(4 << 20, 'The most bytes of a chunk.', low=1)
  blob_bytes: int = option(16 << 20, 'The most bytes of a blob.', low=1)
  patience: float = option(10.0, 'Seconds that a silent reader is waited for.')
  full_every: int = option(
    32,
    'Number of versions after which one is written in full again, since differences '
    'have to be put together before they can be loaded; 1 writes no differences.',
    low=1,
  )


class VersionWriter:
  """Writes the part of every version that one process of the learner holds.

  Methods may be called from any thread; one runs at a time.

  Args:
    transport: Where versions are written.
    options: How they are encoded, and how long they are kept.
    part: Number of the process.
    threads: Number of encoding threads; by default up to 4.
  """

  def __init__(
    self,
    transport: Transport,
    *,
    options: VersionWriterOptions = VersionWriterOptions(),
    part: int = 0,
    threads: int | None = None,
  ):
    self._transport = transport
    self._options = options
    self._part = part
    self._writer_id = secrets.token_hex(8)
    self._readers = ReaderRegistry(transport, part, options.patience)
    self._lock = threading.Lock()
    num_threads = threads or min(4, cpu_count())
    self._pool = concurrent.futures.ThreadPoolExecutor(num_threads, 'weights')
    # Names by version; manifests with their data, so that they can be written again.
    self._stored: dict[int, dict[str, bytes | None]] = {}
    self._newest: BaseVersion | None = None
    self._newest_full = -1
    self._chain_bytes = 0  # of the deltas since the newest full version
    self._predecessors_deleted = False

  @property
  def version(self) -> int | None:
    """Returns the newest version; None before the first."""
    return None if self._newest is None else self._newest.manifest.version

  @property
  def digest(self) -> str:
    """Returns the digest of the newest version; '' before the first."""
    return '' if self._newest is None else self._newest.manifest.digest

  def publish(self, version: int, shards: Sequence[Shard]) -> PublishReport:
    """Makes `shards` the newest version.

    Waits while readers read versions that have to be deleted.

    Args:
      version: The number of the version; it must be greater than the one before.
      shards: The weights, which the caller no longer changes.

    Returns:
      What it took.

    Raises:
      ValueError: `version` is not greater than the newest one.
      WeightsError: The transport cannot take it. The version before is then still the
        newest.
    """
    with self._lock:
      check_version_rises(version, self.version)
      if self._newest is None and isinstance(self._transport, SharedMemoryTransport):
        # Those kept and the one being written: checked now, not when some are written.
        size = sum(shard.bits.nbytes for shard in shards)
        self._transport.require((self._options.keep + 1) * size)
      start_time = time.perf_counter()
      while self._delete_old():
        self._repair_missing()
        time.sleep(0.002)
      encode_time = time.perf_counter()
      layout = plan_chunks(shards, self._options.chunk_bytes)
      base = self._newest
      if base is not None and base.manifest.chunk_layout() != layout:
        base = None
      always_full = self._options.full_every == 1
      encoded = encode_chunks(
        shards, layout, base, self._pool.map, always_full=always_full
      )
      if always_full:
        base = None
      put_time = time.perf_counter()
      written_bytes, delta_bytes = self._write(version, shards, base, encoded)
      self._delete_predecessors()
      self._delete_old()
      end_time = time.perf_counter()
      spans.record('weights', 'publisher', 'encode', encode_time, put_time)
      spans.record('weights', 'publisher', 'write', put_time, end_time)
      return PublishReport(
        version,
        self.digest,
        None if base is None else delta_bytes,
        sum(c.bits.nbytes for c in encoded),
        written_bytes,
        sum(c.num_changed for c in encoded),
        sum(c.bits.size for c in encoded),
        encode_s=put_time - encode_time,
        put_s=end_time - put_time,
        wait_s=encode_time - start_time,
      )

  def repair(self) -> None:
    """Writes again what readers miss, and deletes what nobody reads any more.

    Call it about ten times a second.

    Raises:
      WeightsError: It cannot be written.
    """
    with self._lock:
      self._repair_missing()
      self._delete_old()

  def close(self) -> None:
    """Ends the threads. What was published stays until the transport is closed."""
    self._pool.shutdown()

  def _write(
    self,
    version: int,
    shards: Sequence[Shard],
    base: BaseVersion | None,
    encoded: Sequence[EncodedChunk],
  ) -> tuple[int, int]:
    """Writes blobs, the manifest, and then the record that makes it the newest version.

    Returns the bytes written in total, and those that readers of the base need.
    """
    stored: dict[str, bytes | None] = {}
    written_bytes = 0

    def put(number: int, data: list[Buffer]) -> int:
      nonlocal written_bytes
      key = blob_key(self._part, self._writer_id, version, number)
      stored[key] = None
      self._transport.put(key, *data)
      size = sum(map(len, data))
      written_bytes += size
      return size

    full_bytes = sum(c.bits.nbytes for c in encoded)

    def should_write_full(delta_bytes: int) -> bool:
      num_since_full = len([v for v in self._stored if v > self._newest_full])
      if num_since_full + 1 >= self._options.full_every:
        return True
      return self._chain_bytes + delta_bytes > MAX_CHAIN_SHARE * full_bytes

    try:
      manifest, delta_bytes = write_version(
        version,
        None if base is None else base.manifest.version,
        encoded,
        regions=[shard.region for shard in shards],
        should_write_full=should_write_full,
        put=put,
        blob_bytes=self._options.blob_bytes,
        contiguous=self._transport.mapped,
      )
      data = manifest.encode()
      key = manifest_key(self._part, self._writer_id, version)
      stored[key] = data
      self._transport.put(key, data)
      self._announce(version)
    except BaseException:
      for key in stored:
        self._transport.delete(key)
      raise
    self._stored[version] = stored
    # Without references to the version before.
    self._newest = BaseVersion(manifest, [Shard(s.region, s.bits) for s in shards])
    self._chain_bytes += delta_bytes
    if manifest.is_full:
      self._newest_full, self._chain_bytes = version, 0
    return written_bytes + len(data), delta_bytes + len(data)

  def _announce(self, version: int) -> None:
    """Writes which version is the newest, unless that is written already."""
    key = latest_key(self._part)
    data = encode_record({'run': self._writer_id, 'version': version})
    with contextlib.suppress(KeyError):
      if bytes(self._transport.get(key)) == data:
        return
    self._transport.put(key, data)

  def _delete_old(self) -> list[int]:
    """Deletes the versions that nobody needs; returns those still being read."""
    oldest_kept = min([self._newest_full, *sorted(self._stored)[-self._options.keep :]])
    old = [version for version in self._stored if version < oldest_kept]
    if old:
      statuses = self._readers.living_readers().values()
      reading = [s.reading for s in statuses if s.writer == self._writer_id]
      newest_read = max((v for v in reading if v is not None), default=-1)
      for version in [version for version in old if version > newest_read]:
        for key in self._stored.pop(version):
          self._transport.delete(key)
    return [version for version in old if version in self._stored]

  def _delete_predecessors(self) -> None:
    """Deletes, once, what writers before this one have left."""
    if self._predecessors_deleted:
      return
    self._predecessors_deleted = True
    own_prefix = writer_prefix(self._part, self._writer_id)
    for key in self._transport.names(part_prefix(self._part)):
      if not key.startswith(own_prefix):
        self._transport.delete(key)

  def _repair_missing(self) -> None:
    """Writes again what readers report missing."""
    if self._newest is None:
      return
    manifest, shards = self._newest.manifest, self._newest.shards
    self._announce(manifest.version)
    for status in self._readers.new_reports():
      if status.writer != self._writer_id:
        continue
      if status.manifest_missing:
        for stored in self._stored.values():
          for key, data in stored.items():
            if data is not None:
              self._transport.put(key, data)
      if status.reading != manifest.version:
        continue  # the reader will find a newer one
      for region, number in status.missing_chunks:
        self._repair_chunk(manifest, shards, (region, number))

  def _repair_chunk(
    self, manifest: Manifest, shards: Sequence[Shard], index: ChunkIndex
  ) -> None:
    """Writes a chunk of the newest version in full, in a blob of its own."""
    region, chunks = manifest.regions[index[0]]
    chunk = chunks[index[1]]
    bits = shards[index[0]].bits[chunk.start : chunk.start + chunk.count]
    packer = BlobPacker(self._options.blob_bytes)
    packer.add(chunk_label(region, chunk.start), region, RAW, bits, chunk.digest)
    _, data = packer.finish() or (0, [])
    key = repair_key(self._part, self._writer_id, manifest.version, index)
    self._stored[manifest.version][key] = None
    self._transport.put(key, *data)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublisherOptions(VersionWriterOptions, WeightStoreOptions):
  """How a learner publishes its weights for other processes."""

  on_device: bool = option(
    False,
    'Find changes on the devices, with `DeviceDeltaSnapshot`, and copy only those to '
    'the host; another copy of the weights stays on the devices.',
  )
  tend: float = option(0.05, 'Seconds between two looks for what readers miss.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectStoreOptions(PublisherOptions):
  """Puts blobs into the object stores of Ray's nodes; a node fetches each once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedMemoryOptions(PublisherOptions):
  """Writes files in memory that all processes of one machine map; needs Ray."""

  # Nothing travels, and what is whole is loaded as it lies.
  full_every: int = dataclasses.field(
    default=1, init=False, metadata={'doc': 'Every version is written in full.'}
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedFolderOptions(FolderOptions, PublisherOptions):
  """Writes files into a folder that all processes share."""


class WeightPublisher:
  """Publishes one learner process's weights for engines in other processes.

  It is a `WeightStore`; engines read the versions with a `WeightSubscriber` each, on
  the same transport.

  Args:
    transport: Where versions are written.
    device_thread: The thread on which snapshots are taken.
    options: How they are published.
    part: Number of this process of the learner.
    parts: Number of the learner's processes.
    threads: As `VersionWriter` has it.

  Attributes:
    report: What the newest version took; None before the first.
  """

  def __init__(
    self,
    transport: Transport,
    *,
    device_thread: DeviceThread,
    options: PublisherOptions = PublisherOptions(),
    part: int = 0,
    parts: int = 1,
    threads: int | None = None,
  ):
    self._device_thread = device_thread
    snapshots = DeviceDeltaSnapshot if options.on_device else FrozenBaseSnapshot
    self._snapshot = snapshots(options.dtype).snapshot
    self._writer = VersionWriter(transport, options=options, part=part, threads=threads)
    self._transport = transport
    self._part = part
    self._parts = parts
    self._repair_interval_s = options.tend
    self._subscriber: WeightSubscriber | None = None
    self._repair_task: asyncio.Task[None] | None = None
    self.report: PublishReport | None = None

  @property
  def version(self) -> int | None:
    """Returns the newest version; None before the first."""
    return self._writer.version

  @property
  def digest(self) -> str:
    """Returns the digest of this process's part of the newest version."""
    return self._writer.digest

  async def publish(self, version: int, params: Params) -> None:
    """Makes `params` the newest version; they may be donated when this returns.

    Only the copy to the host takes time of the device thread. Waits for readers that
    still read what has to be deleted.

    Args:
      version: The number of the version; it must be greater than the one before.
      params: The parameters.

    Raises:
      ValueError: `version` is not greater than the newest one.
      WeightsError: The transport cannot take it.
    """
    shards = await self._device_thread.run(self._snapshot, params)
    self.report = await asyncio.to_thread(self._writer.publish, version, shards)
    if self._repair_task is None:
      self._repair_task = asyncio.create_task(self._repair_forever())

  async def combined_digest(self) -> str:
    """Returns the digests of all parts of the newest version, joined by '-'.

    This is what `EngineWeightClient.pull` returns if the engine has the same weights.

    Raises:
      WeightsError: Another process of the learner does not publish it in time.
    """
    version = self.version
    if version is None:
      return ''
    digests = (self._part_digest(part, version) for part in range(self._parts))
    return '-'.join(await asyncio.gather(*digests))

  def metrics(self) -> dict[str, float]:
    """Returns what the newest version took, this process's part; {} before the first.

    Returns:
      weights/bytes for a reader of the version before, weights/full_bytes for any
      other, weights/share, their ratio, weights/changed of all weights, and seconds.
    """
    report = self.report
    if report is None:
      return {}
    sent = report.full_bytes if report.delta_bytes is None else report.delta_bytes
    return {
      'weights/bytes': float(sent),
      'weights/full_bytes': float(report.full_bytes),
      'weights/share': sent / max(report.full_bytes, 1),
      'weights/changed': report.num_changed / max(report.num_elements, 1),
      'weights/encode_s': report.encode_s,
      'weights/put_s': report.put_s,
      'weights/wait_s': report.wait_s,
    }

  async def fetch(self, newer_than: int = -1) -> tuple[int, Params]:
    """Returns (version, params) as an engine gets them: through the transport."""
    if self._subscriber is None:
      self._subscriber = WeightSubscriber(self._transport, parts=self._parts)
    return await self._subscriber.fetch(newer_than)

  async def close(self) -> None:
    """Ends the threads and tasks. The caller closes the transport."""
    if self._repair_task is not None:
      self._repair_task.cancel()
      await asyncio.gather(self._repair_task, return_exceptions=True)
    if self._subscriber is not None:
      self._subscriber.close()
    self._writer.close()

  async def _part_digest(self, part: int, version: int) -> str:
    if part == self._part:
      return self.digest
    reader = ManifestReader(self._transport, part, tries=3)
    start_time = time.monotonic()
    while time.monotonic() - start_time < PEER_TIMEOUT_S:
      latest = await asyncio.to_thread(reader.latest)
      if latest is not None and latest[1] >= version:
        manifest = await asyncio.to_thread(reader.manifest, latest[0], version)
        return manifest.digest
      await asyncio.sleep(PEER_POLL_INTERVAL_S)
    raise WeightsError(
      f'process {part} of the learner has not published version {version} within '
      f'{PEER_TIMEOUT_S:g} s'
    )

  async def _repair_forever(self) -> None:
    while True:
      await asyncio.sleep(self._repair_interval_s)
      try:
        await asyncio.to_thread(self._writer.repair)
      except WeightsError as error:
        log.warning('weights could not be sent again: %s', error)
