"""The weight subscriber loads published versions at an engine's end and verifies them.

`WeightSubscriber` is awaited; it runs a `VersionReader`, which reads new versions
behind the one in use and verifies every chunk, in other threads.
"""

import asyncio
import concurrent.futures
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import spans
from jaxrl.device_thread import cpu_count
from jaxrl.rollout.weights.manifest import (
  ChunkIndex,
  Manifest,
  checksum,
  contents_digest,
)
from jaxrl.rollout.weights.manifest_reader import ManifestReader
from jaxrl.rollout.weights.reader_registry import ReaderHeartbeat
from jaxrl.rollout.weights.shards import (
  Region,
  Shard,
  Window,
  as_uint_view,
  assemble,
  flatten,
  overlap,
)
from jaxrl.rollout.weights.transport import CorruptWeightsError, Transport, WeightsError
from jaxrl.types import AnyArray, Params

HEARTBEAT_INTERVAL_S = 0.5  # between two signs of life while a version is read
POLL_INTERVAL_S = 0.01  # between two looks for a newer version
RETRY_INTERVAL_S = 0.05  # between two looks for what was missing
MAX_TRIES = 3  # of asking for a chunk before it is reported missing


class MissingChunksError(CorruptWeightsError):
  """Chunks of a version are missing or corrupt.

  Attributes:
    chunks: Which ones.
  """

  def __init__(self, message: str, chunks: tuple[ChunkIndex, ...]):
    super().__init__(message)
    self.chunks = chunks


@dataclasses.dataclass(frozen=True)
class LoadReport:
  """What it took to load a version.

  Attributes:
    version: Its number.
    full: Whether the full bytes were read, instead of differences.
    received_bytes: Bytes of the payloads.
    repeats: How often something had to be asked for again.
    seconds: Time that it took.
  """

  version: int
  full: bool
  received_bytes: int
  repeats: int
  seconds: float


class VersionReader:
  """Holds the newest version of a learner's weights. Its methods are thread-safe.

  Args:
    transport: Where versions are written.
    parts: Number of the learner's processes, each of which is a publisher.
    windows: By parameter, the slice of it that is wanted; others are wanted whole.
    threads: Number of decoding threads; by default up to 4.

  Attributes:
    load_report: What the newest version took; None before the first.
    problem: Why the last version could not be read; None if it could.
  """

  def __init__(
    self,
    transport: Transport,
    *,
    parts: int = 1,
    windows: Mapping[str, Window] | None = None,
    threads: int | None = None,
  ):
    num_threads = threads or min(4, cpu_count())
    self._pool = concurrent.futures.ThreadPoolExecutor(num_threads, 'weights')
    self._windows = dict(windows or {})
    self._parts = [
      _PartReader(
        ManifestReader(transport, part, MAX_TRIES),
        ReaderHeartbeat(transport, part),
        self._windows,
      )
      for part in range(parts)
    ]
    self._lock = threading.Lock()
    self._newest: tuple[list[str], int] | None = None
    self.load_report: LoadReport | None = None
    self.problem: CorruptWeightsError | None = None

  @property
  def version(self) -> int | None:
    """Returns the version held; None before the first."""
    return None if self._newest is None else self._newest[1]

  @property
  def writers(self) -> list[str]:
    """Returns the writers of the version held; they change if the learner restarts."""
    return [] if self._newest is None else self._newest[0]

  @property
  def digests(self) -> tuple[str, ...]:
    """Returns the digest of each loaded part, equal to the published one."""
    return tuple(part.digest for part in self._parts)

  def poll(self) -> int | None:
    """Loads the newest version if it is not the one held.

    Returns:
      Its number. None if there is no other version, or it could not be read completely:
      then `problem` says why, the publisher has been notified, and nothing has changed.
    """
    with self._lock:
      return self._poll()

  def _poll(self) -> int | None:
    latest = [part.reader.latest() for part in self._parts]
    complete = [one for one in latest if one is not None]
    if len(complete) < len(latest):
      return None
    writers = [writer for writer, _ in complete]
    version = min(latest_version for _, latest_version in complete)
    if self._newest == (writers, version):
      return None
    start_time = time.perf_counter()
    repeats = sum(part.reader.repeats for part in self._parts)
    received_bytes = sum(part.reader.received_bytes for part in self._parts)
    loaded = [
      part.load(writer, version, self._pool)
      for part, writer in zip(self._parts, writers, strict=True)
    ]
    problems = [part.problem for part in self._parts if part.problem]
    self.problem = problems[0] if problems else None
    if not all(loaded):
      return None
    for part in self._parts:
      part.swap()
    self._newest = writers, version
    end_time = time.perf_counter()
    spans.record(
      'weights', 'reader', 'fetch', start_time, end_time, detail=f'version {version}'
    )
    self.load_report = LoadReport(
      version,
      any(part.full for part in self._parts),
      sum(part.reader.received_bytes for part in self._parts) - received_bytes,
      sum(part.reader.repeats for part in self._parts) - repeats,
      end_time - start_time,
    )
    return version

  def params(self) -> Params:
    """Returns the version held, as nested dicts of read-only arrays.

    They last until the version after the next one is loaded; copy them to keep them.

    Raises:
      LookupError: No version has been loaded.
    """
    if self._newest is None:
      raise LookupError('no weights have been received')
    shards = [shard for part in self._parts for shard in part.shards()]
    return assemble(shards, self._windows)

  def take(
    self, place: Callable[[Params], Params] | None = None
  ) -> tuple[list[str], int, Params]:
    """Returns (writers, version, params) of the same version.

    Args:
      place: Turns the arrays on the host into what is returned, such as copies.
    """
    with self._lock:
      params = self.params()
      assert self._newest is not None
      writers, version = self._newest
      return writers, version, params if place is None else place(params)

  def digests_of(self, params: Params) -> tuple[str, ...]:
    """Returns what `digests` would be if `params` had been loaded.

    Args:
      params: Arrays of the version held. A region that a window cuts counts as it was
        published.
    """
    with self._lock:
      leaves = flatten(params)
      return tuple(part.digest_of(leaves, self._pool) for part in self._parts)

  def close(self) -> None:
    """Leaves the reader registry; the arrays handed out remain valid."""
    for part in self._parts:
      part.heartbeat.leave()
    self._pool.shutdown()


class _PartReader:
  """Reads one publisher's part into two sets of arrays, one of which is in use.

  An array is a buffer of this reader's own, or a read-only view of shared memory.
  """

  def __init__(
    self,
    reader: ManifestReader,
    heartbeat: ReaderHeartbeat,
    windows: Mapping[str, Window],
  ):
    self.reader = reader
    self.heartbeat = heartbeat
    self.digest = ''
    self.full = False
    self.problem: CorruptWeightsError | None = None
    self._windows = windows
    self._held: Manifest | None = None
    self._held_writer = ''
    self._front: list[np.ndarray | None] = []
    self._back: list[np.ndarray | None] = []
    self._next: tuple[str, Manifest] | None = None

  def load(
    self, writer: str, version: int, pool: concurrent.futures.ThreadPoolExecutor
  ) -> bool:
    """Fills the arrays not in use; on failure sets `problem` and returns False."""
    self._next, self.problem = None, None
    self.heartbeat.start_reading(writer, version)
    held = self._held if writer == self._held_writer else None
    try:
      if held is not None and held.version == version:  # another part was late
        self._next = writer, held
        self._back = [x.copy() if _is_own(x) else x for x in self._front]
        return True
      chain, self.full = self.reader.find_chain(writer, version, held)
    except CorruptWeightsError as error:
      self.problem = error
      self.heartbeat.report_missing(manifest=True)
      return False
    try:
      self._read_chunks(writer, chain, pool)
    except MissingChunksError as error:
      self.problem = error
      self.heartbeat.report_missing(error.chunks)
      return False
    finally:
      self.reader.release_blobs()
    self._next = writer, chain[-1]
    self.heartbeat.finish_reading()
    return True

  def swap(self) -> None:
    """Puts what was loaded into use, in one go."""
    assert self._next is not None
    self._held_writer, self._held = self._next
    self._front, old = self._back, self._front
    self._back = [x if _is_own(x) else None for x in old]  # mapped memory may be freed
    self.digest = self._held.digest

  def shards(self) -> Iterator[Shard]:
    """Yields the shards in use."""
    assert self._held is not None
    for (region, _), bits in zip(self._held.regions, self._front, strict=True):
      if bits is not None:
        yield Shard(region, bits)

  def digest_of(
    self, leaves: Mapping[str, AnyArray], pool: concurrent.futures.ThreadPoolExecutor
  ) -> str:
    """Returns the digest of the regions as they are in `leaves`, by dotted name."""
    assert self._held is not None
    work: list[np.ndarray | str] = []
    for region, chunks in self._held.regions:
      common = overlap(region, self._windows.get(region.name))
      is_whole = common is not None and all(
        s.stop - s.start == n for s, n in zip(common[1], region.extent, strict=True)
      )
      if common is None or not is_whole:
        work += [c.digest for c in chunks]
        continue
      array = np.asarray(leaves[region.name])[common[0]]
      bits = as_uint_view(np.ascontiguousarray(array))
      work += [bits[c.start : c.start + c.count] for c in chunks]
    digests = pool.map(lambda x: x if isinstance(x, str) else checksum(x), work)
    return contents_digest(
      (region, [(c.start, next(digests)) for c in chunks])
      for region, chunks in self._held.regions
    )

  def _read_chunks(
    self,
    writer: str,
    chain: list[Manifest],
    pool: concurrent.futures.ThreadPoolExecutor,
  ) -> None:
    """Raises MissingChunksError unless all of it is what was published."""
    target = chain[-1]
    wanted = [r for r, (region, _) in enumerate(target.regions) if self._wants(region)]
    mapped = {r: self.reader.map_region(writer, chain, r, self.full) for r in wanted}
    mapped = {r: bits for r, bits in mapped.items() if bits is not None}

    def verify(index: ChunkIndex) -> str:
      region, number = index
      chunk = target.regions[region][1][number]
      bits = mapped[region][chunk.start : chunk.start + chunk.count]
      return self.reader.verify_chunk(bits, chunk, bits.nbytes)

    def rebuild(index: ChunkIndex) -> str:
      region, number = index
      chunk = target.regions[region][1][number]
      box = slice(chunk.start, chunk.start + chunk.count)
      out, old = self._back[region], None if self.full else self._front[region]
      assert out is not None
      old_chunk = None if old is None else old[box]
      return self.reader.rebuild_chunk(out[box], old_chunk, writer, chain, index)

    results = self._for_each_chunk(verify, target, mapped, pool)
    for (region, _), result in results.items():
      if isinstance(result, CorruptWeightsError):
        mapped.pop(region, None)  # to be rebuilt, maybe from what is sent again
    self._back = _make_buffers(target, wanted, mapped, self._back)
    rest = [r for r in wanted if r not in mapped]
    results |= self._for_each_chunk(rebuild, target, rest, pool)
    missing = tuple(
      index
      for index, result in results.items()
      if isinstance(result, CorruptWeightsError)
    )
    if missing:
      raise MissingChunksError(
        f'version {target.version}: {results[missing[0]]}', missing
      )
    contents = [
      (region, [(c.start, results.get((r, i), c.digest)) for i, c in enumerate(chunks)])
      for r, (region, chunks) in enumerate(target.regions)
    ]
    if contents_digest(contents) != target.digest:  # pyright: ignore
      raise MissingChunksError(
        f'version {target.version}: another digest than published', ()
      )

  def _for_each_chunk(
    self,
    run: Callable[[ChunkIndex], str],
    target: Manifest,
    regions: Iterable[int],
    pool: concurrent.futures.ThreadPoolExecutor,
  ) -> dict[ChunkIndex, str | CorruptWeightsError]:
    """Returns the result of `run` for every chunk of some regions, or its error."""
    work = [(r, i) for r in regions for i in range(len(target.regions[r][1]))]
    # Readers begin at different chunks, so that they can fetch from one another.
    start = self.heartbeat.number % max(len(work), 1)
    work = work[start:] + work[:start]

    def run_or_error(index: ChunkIndex) -> str | CorruptWeightsError:
      try:
        return run(index)
      except CorruptWeightsError as error:
        return error

    results, last_beat = {}, time.monotonic()
    for index, result in zip(work, pool.map(run_or_error, work), strict=True):
      results[index] = result
      if time.monotonic() - last_beat > HEARTBEAT_INTERVAL_S:
        last_beat = time.monotonic()
        self.heartbeat.beat()
    return results

  def _wants(self, region: Region) -> bool:
    window = self._windows.get(region.name)
    return not region.size or overlap(region, window) is not None


def _is_own(array: np.ndarray | None) -> TypeGuard[np.ndarray]:
  """Returns whether this reader may write to the array."""
  return array is not None and array.flags.writeable


def _make_buffers(
  manifest: Manifest,
  wanted: Sequence[int],
  mapped: Mapping[int, np.ndarray],
  spare: list[np.ndarray | None],
) -> list[np.ndarray | None]:
  """Returns mapped regions, and buffers for the others: spare ones where they fit."""
  buffers: list[np.ndarray | None] = [None] * len(manifest.regions)
  for r in wanted:
    region = manifest.regions[r][0]
    old = spare[r] if r < len(spare) else None
    dtype = np.dtype(f'u{region.itemsize}')
    if r in mapped:
      buffers[r] = mapped[r]
    elif _is_own(old) and (old.size, old.dtype) == (region.size, dtype):
      buffers[r] = old
    else:
      buffers[r] = np.empty(region.size, dtype)
  return buffers


def place_on_device(params: Params) -> Params:
  """Returns copies on JAX's first device, which are ready."""
  return jax.block_until_ready(jax.tree.map(lambda x: jnp.array(x, copy=True), params))


class WeightSubscriber:
  """Fetches new versions from a transport, as `WeightStore.fetch` does.

  Args:
    transport: Where versions are written.
    parts: Number of the learner's processes.
    windows: By parameter, the slice of it that is wanted; others are wanted whole.
    place: Turns arrays on the host into what `fetch` returns; by default, copies on
      JAX's first device. None: the arrays themselves, which last as `VersionReader`
      says.
    patience: Seconds that weights may stay incomplete before `fetch` raises.

  Attributes:
    reader: Reads the versions.
  """

  def __init__(
    self,
    transport: Transport,
    *,
    parts: int = 1,
    windows: Mapping[str, Window] | None = None,
    place: Callable[[Params], Params] | None = place_on_device,
    patience: float = 60.0,
  ):
    self.reader = VersionReader(transport, parts=parts, windows=windows)
    self._place = place
    self._patience = patience
    self._last_writers: list[str] = []

  async def fetch(
    self, newer_than: int = -1, *, published: bool = False
  ) -> tuple[int, Params]:
    """Waits for a version after `newer_than`, or for the first of a restarted learner.

    Args:
      newer_than: A version number.
      published: Such a version is known to exist, so failing to find it is an error.

    Returns:
      The version and its parameters.

    Raises:
      WeightsError: There is such a version, but it cannot be read completely.
    """
    await self._wait(newer_than, published)
    taken = await asyncio.to_thread(self.reader.take, self._place)
    self._last_writers, version, params = taken
    return version, params

  def close(self) -> None:
    """Leaves the reader registry."""
    self.reader.close()

  async def _wait(self, newer_than: int, published: bool) -> None:
    incomplete_since: float | None = None
    absent_since = time.monotonic()
    while True:
      await asyncio.to_thread(self.reader.poll)
      problem, now = self.reader.problem, time.monotonic()
      if problem is None:
        incomplete_since, version = None, self.reader.version
        restarted = bool(self._last_writers) and (
          self.reader.writers != self._last_writers
        )
        if version is not None and (version > newer_than or restarted):
          return
        if published and now - absent_since > self._patience:
          raise WeightsError(
            f'no version after {newer_than} was found for {self._patience:g} s, though '
            'one was published: learner and engine may not see the same place '
            f'(weight_sync.transport; {socket.gethostname()} found {version})'
          )
        await asyncio.sleep(POLL_INTERVAL_S)
        continue
      absent_since = now
      incomplete_since = now if incomplete_since is None else incomplete_since
      if now - incomplete_since > self._patience:
        raise WeightsError(
          f'weights stayed incomplete for {self._patience:g} s: {problem}'
        ) from problem
      await asyncio.sleep(RETRY_INTERVAL_S)
