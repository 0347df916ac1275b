"""The learner's end: publishes versions, keeps the newest, mends what got lost.

Each version but the first is written as its difference from the one before. Receivers
that are a few versions behind apply a chain of these: encoded once, the same bytes for
all, where the difference from each receiver's own version would cost a pass over all
weights for every one. Now and then a version is written in full as well, so that a
late joiner needs one full version and a short chain.
"""

import concurrent.futures
import contextlib
import dataclasses
import secrets
import threading
import time
from collections.abc import Sequence

from jaxrl import processors
from jaxrl.rollout.weights import names
from jaxrl.rollout.weights.blobs import Packer, label
from jaxrl.rollout.weights.encoding import Before, Coded, encode, plan, write
from jaxrl.rollout.weights.layout import Shard
from jaxrl.rollout.weights.leases import Leases
from jaxrl.rollout.weights.shared_memory import SharedMemory
from jaxrl.rollout.weights.transport import Buffer, Transport
from jaxrl.rollout.weights.wire import RAW, Manifest, frame

CHUNK_BYTES = 4 << 20
BLOB_BYTES = 16 << 20
CHAIN_SHARE = 0.5  # of the full bytes, that a late joiner reads in deltas at most


@dataclasses.dataclass(frozen=True)
class Report:
  """What a version took. delta_bytes: for a receiver of the version before, manifest
  included; None without a base. full_bytes: of the weights. written_bytes: in all.
  changed, elements: how many weights differ from the version before, of how many.
  Seconds: encoding, handing to the transport, waiting for slow receivers.
  """

  version: int
  digest: str
  delta_bytes: int | None
  full_bytes: int
  written_bytes: int
  changed: int
  elements: int
  encode_s: float
  put_s: float
  wait_s: float


class Publisher:
  """Publishes what one process of the learner holds.

  part: which process. keep: newest versions that stay, besides the newest full one and
  all after it. chunk_bytes, blob_bytes: bounds. full_every: versions until one is
  written in full again; 1: no version is a difference, which spares bytes on their way
  but is put together before it can be loaded. patience: seconds that a silent receiver
  is waited for.
  Methods may be called from any thread; one runs at a time.
  """

  def __init__(
    self,
    transport: Transport,
    *,
    part: int = 0,
    keep: int = 2,
    chunk_bytes: int = CHUNK_BYTES,
    blob_bytes: int = BLOB_BYTES,
    full_every: int = 32,
    patience: float = 10.0,
    threads: int | None = None,
  ):
    if keep < 1 or full_every < 1:
      raise ValueError(f'keep={keep} and full_every={full_every} must be at least 1')
    self._transport, self._part, self._keep = transport, part, keep
    self._chunk_bytes, self._blob_bytes = chunk_bytes, blob_bytes
    self._full_every = full_every
    self._run = secrets.token_hex(8)
    self._leases = Leases(transport, part, patience)
    self._lock = threading.Lock()
    threads = threads or min(4, processors.count())
    self._pool = concurrent.futures.ThreadPoolExecutor(threads, 'weights')
    self._stored: dict[int, dict[str, bytes | None]] = {}  # by version, then name
    self._newest: Before | None = None
    self._swept = False
    self._full, self._chain = -1, 0  # newest full version; bytes of deltas since

  @property
  def version(self) -> int | None:
    """The newest version; None before the first."""
    return None if self._newest is None else self._newest.manifest.version

  @property
  def digest(self) -> str:
    """Of the newest version; '' before the first."""
    return '' if self._newest is None else self._newest.manifest.digest

  def publish(self, version: int, shards: Sequence[Shard]) -> Report:
    """Makes `shards`, which the caller no longer changes, the newest version.

    Waits while receivers read versions that ought to be freed. Raises ValueError
    unless `version` rises, WeightsError when the transport cannot take it; the version
    before is then still the newest.
    """
    with self._lock:
      if self.version is not None and version <= self.version:
        raise ValueError(
          f'weights version {version} was published after version {self.version}; '
          'versions must rise'
        )
      if self._newest is None and isinstance(self._transport, SharedMemory):
        # Those kept, and the one that is put: said now, not when some are written.
        self._transport.require((self._keep + 1) * sum(x.words.nbytes for x in shards))
      begun = time.perf_counter()
      while self._free():
        self._mend()
        time.sleep(0.002)
      waited = time.perf_counter()
      layout = plan(shards, self._chunk_bytes)
      base = self._newest
      if base is not None and base.manifest.layout() != layout:
        base = None
      whole = self._full_every == 1
      coded = encode(shards, layout, base, self._pool.map, whole=whole)
      base = None if whole else base
      encoded = time.perf_counter()
      written, sent = self._write(version, shards, base, coded)
      self._sweep()
      self._free()
      return Report(
        version,
        self.digest,
        None if base is None else sent,
        sum(c.words.nbytes for c in coded),
        written,
        sum(c.changed for c in coded),
        sum(c.words.size for c in coded),
        encode_s=encoded - waited,
        put_s=time.perf_counter() - encoded,
        wait_s=waited - begun,
      )

  def tend(self) -> None:
    """Sends again what receivers miss, and frees what nobody reads any more.

    To be called some ten times a second. Raises WeightsError when it cannot be sent.
    """
    with self._lock:
      self._mend()
      self._free()

  def close(self) -> None:
    """Ends the threads. What was published stays until the transport is closed."""
    self._pool.shutdown()

  def _write(
    self,
    version: int,
    shards: Sequence[Shard],
    base: Before | None,
    coded: Sequence[Coded],
  ) -> tuple[int, int]:
    """Blobs, manifest, and then the head, by which the version exists.

    Returns the bytes written in all, and those that the version before needs.
    """
    stored: dict[str, bytes | None] = {}
    written = 0

    def put(number: int, data: list[Buffer]) -> int:
      nonlocal written
      name = names.blob(self._part, self._run, version, number)
      stored[name] = None
      self._transport.put(name, *data)
      size = sum(map(len, data))
      written += size
      return size

    number = None if base is None else base.manifest.version
    regions = [shard.region for shard in shards]
    options = {
      'regions': regions,
      'blob_bytes': self._blob_bytes,
      'together': self._transport.mapped,
    }
    whole = sum(c.words.nbytes for c in coded)

    def full(delta_bytes: int) -> bool:
      long = len([v for v in self._stored if v > self._full]) + 1 >= self._full_every
      return long or self._chain + delta_bytes > CHAIN_SHARE * whole

    try:
      manifest, delta_bytes = write(
        version, number, coded, full=full, put=put, **options
      )
      data = manifest.encode()
      name = names.manifest(self._part, self._run, version)
      stored[name] = data
      self._transport.put(name, data)
      self._announce(version)
    except BaseException:
      for name in stored:
        self._transport.delete(name)
      raise
    bare = [Shard(shard.region, shard.words) for shard in shards]
    self._stored[version], self._newest = stored, Before(manifest, bare)
    self._chain += delta_bytes
    if manifest.complete:
      self._full, self._chain = version, 0
    return written + len(data), delta_bytes + len(data)

  def _announce(self, version: int) -> None:
    """Writes the head unless it is there already."""
    name = names.head(self._part)
    data = frame({'run': self._run, 'version': version})
    with contextlib.suppress(KeyError):
      if bytes(self._transport.get(name)) == data:
        return
    self._transport.put(name, data)

  def _free(self) -> list[int]:
    """Deletes the versions that nobody needs; returns those that are still read."""
    floor = min([self._full, *sorted(self._stored)[-self._keep :]])
    old = [version for version in self._stored if version < floor]
    if old:
      records = self._leases.read().values()
      ours = [r.reading for r in records if r.run == self._run]
      reading = max((v for v in ours if v is not None), default=-1)
      for version in [version for version in old if version > reading]:
        for name in self._stored.pop(version):
          self._transport.delete(name)
    return [version for version in old if version in self._stored]

  def _sweep(self) -> None:
    """Deletes what publishers before this one have left."""
    if self._swept:
      return
    self._swept, ours = True, names.of_run(self._part, self._run)
    for name in self._transport.names(names.of_part(self._part)):
      if not name.startswith(ours):
        self._transport.delete(name)

  def _mend(self) -> None:
    """Puts again what receivers complain about."""
    if self._newest is None:
      return
    manifest, shards = self._newest.manifest, self._newest.shards
    self._announce(manifest.version)
    for record in self._leases.complaints():
      if record.run != self._run:
        continue
      if record.manifest:
        for stored in self._stored.values():
          for name, data in stored.items():
            if data is not None:
              self._transport.put(name, data)
      if record.reading != manifest.version:
        continue  # it will find a newer one
      for place in record.misses:
        self._repair(manifest, shards, *place)

  def _repair(
    self, manifest: Manifest, shards: Sequence[Shard], region: int, chunk: int
  ) -> None:
    """Puts a chunk of the newest version in full, in a blob of its own."""
    box, chunks = manifest.regions[region]
    found = chunks[chunk]
    words = shards[region].words[found.start : found.start + found.count]
    packer = Packer(self._blob_bytes)
    packer.add(label(box, found.start), box, RAW, words, found.digest)
    _, data = packer.finish() or (0, [])
    name = names.repair(self._part, self._run, manifest.version, region, chunk)
    self._stored[manifest.version][name] = None
    self._transport.put(name, *data)
