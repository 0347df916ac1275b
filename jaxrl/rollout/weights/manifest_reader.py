"""A manifest reader gets one publisher's manifests and chunks and verifies them."""

import threading
from collections.abc import Sequence

import numpy as np

from jaxrl.rollout.weights.delta_encoding import apply_delta
from jaxrl.rollout.weights.manifest import (
  RAW,
  SAME,
  SPARSE,
  Chunk,
  ChunkIndex,
  Manifest,
  Payload,
  blob_key,
  checksum,
  decode_record,
  latest_key,
  manifest_key,
  read_payload,
  repair_key,
)
from jaxrl.rollout.weights.transport import CorruptWeightsError, Transport


class ManifestReader:
  """Reads what one publisher has written.

  A chain of versions is a list of manifests, each of which has the one before it as its
  base. Following a chain leads from a version that is held, or from full bytes, to the
  version that is wanted.

  Args:
    transport: Where the versions are.
    part: Number of the publisher's part.
    tries: How often anything is asked for before it counts as missing.

  Attributes:
    repeats: How often something had to be asked for again.
    received_bytes: Bytes of all payloads used.
  """

  def __init__(self, transport: Transport, part: int, tries: int):
    self._transport = transport
    self._part = part
    self._tries = tries
    self._blobs: dict[tuple[int, int], memoryview] = {}
    self._lock = threading.Lock()
    self.repeats = 0
    self.received_bytes = 0

  def latest(self) -> tuple[str, int] | None:
    """Returns (writer, newest version); None if there is none, or it is unreadable."""
    try:
      body = decode_record(self._transport.get(latest_key(self._part)))
      return str(body['run']), int(body['version'])
    except (KeyError, TypeError, ValueError, CorruptWeightsError):
      return None

  def manifest(self, writer: str, version: int, tries: int | None = None) -> Manifest:
    """Returns a version's manifest.

    Raises:
      CorruptWeightsError: It is missing or corrupt after all tries.
    """
    problem = CorruptWeightsError(f'version {version} has no manifest')
    for attempt in range(tries or self._tries):
      try:
        data = self._transport.get(manifest_key(self._part, writer, version))
        manifest = Manifest.decode(data)
        self._count(len(data), attempt)
        if manifest.version == version:
          return manifest
      except KeyError:
        continue
      except CorruptWeightsError as error:
        problem = error
    raise problem

  def find_chain(
    self, writer: str, version: int, held: Manifest | None
  ) -> tuple[list[Manifest], bool]:
    """Returns the cheaper of two chains: from `held`, or from the newest full version.

    Args:
      writer: Id of the writer.
      version: The version wanted.
      held: The version held; None if there is none.

    Returns:
      The manifests in ascending order, and whether the first is read in full.

    Raises:
      CorruptWeightsError: Manifests are missing.
    """
    chain = [self.manifest(writer, version)]
    full: list[Manifest] | None = None
    while True:
      first = chain[0]
      if full is None and first.is_full:
        full = list(chain)
      if held is not None and first.base == held.version:
        costs_more = full is not None and _num_bytes(chain, False) > _num_bytes(
          full, True
        )
        if not costs_more and first.chunk_layout() == held.chunk_layout():
          return chain, False
      after_held = held is not None and (first.base or 0) > held.version
      if first.base is None or (full is not None and not after_held):
        break
      try:
        chain.insert(0, self.manifest(writer, first.base, 1 if full else None))
      except CorruptWeightsError:
        if full is None:
          raise
        break
    if full is None:
      raise CorruptWeightsError(f'version {version} leads back to no full version')
    return full, True

  def rebuild_chunk(
    self,
    out: np.ndarray,
    old: np.ndarray | None,
    writer: str,
    chain: Sequence[Manifest],
    index: ChunkIndex,
  ) -> str:
    """Fills `out` with the contents of a chunk of the chain's last version.

    Args:
      out: `[n]` bits, overwritten.
      old: `[n]` bits of the version held; None if the chain starts in full.
      writer: Id of the writer.
      chain: As `find_chain` returns it.
      index: Which chunk.

    Returns:
      The digest of the contents.

    Raises:
      CorruptWeightsError: What was received, or what was put together from it, is not
        what was published. The contents of `out` are then undefined.
    """
    steps, chunk = _chunk_steps(chain, index, old is None)
    raw = [
      i for i, (_, payload) in enumerate(steps) if payload and payload.codec == RAW
    ]
    steps = steps[raw[-1] :] if raw else steps
    for attempt in range(self._tries):
      self._count(0, attempt)
      try:
        if not raw and old is not None:
          np.copyto(out, old)
        size = sum(self._apply_step(out, writer, *step) for step in steps)
        return self.verify_chunk(out, chunk, size)
      except (KeyError, CorruptWeightsError):
        self.release_blobs()
    version = chain[-1].version
    key = repair_key(self._part, writer, version, index)
    payload = Payload(RAW, size=out.nbytes)
    try:
      _copy_bytes(out, read_payload(self._transport.get(key), payload))
    except KeyError:
      raise CorruptWeightsError(f'chunk {index} of version {version} is lost') from None
    return self.verify_chunk(out, chunk, out.nbytes)

  def map_region(
    self, writer: str, chain: Sequence[Manifest], number: int, starts_full: bool
  ) -> np.ndarray | None:
    """Returns a region of the chain's last version where it lies in shared memory.

    Args:
      writer: Id of the writer.
      chain: As `find_chain` returns it.
      number: Which region.
      starts_full: Whether the chain's first version is read in full.

    Returns:
      `[n]` bits, read-only and not verified; None if the region is not contiguous in
      memory that all share, so that `rebuild_chunk` must put it together.
    """
    region, chunks = chain[-1].regions[number]
    if not self._transport.mapped or not chunks:
      return None
    places = []
    for i in range(len(chunks)):
      steps, chunk = _chunk_steps(chain, (number, i), starts_full)
      changes = [(v, p) for v, p in steps if p is None or p.codec != SAME]
      version, payload = changes[-1] if changes else (0, None)
      size = chunk.count * region.itemsize
      if payload is None or (payload.codec, payload.size) != (RAW, size):
        return None
      region_offset = payload.offset - chunk.start * region.itemsize
      places.append((version, payload.blob, region_offset))
    if len(set(places)) > 1:
      return None
    version, blob, offset = places[0]
    payload = Payload(RAW, blob, offset, region.size * region.itemsize)
    try:
      data = read_payload(self._blob(writer, version, blob), payload)
    except (KeyError, CorruptWeightsError):
      return None
    mapped = np.frombuffer(data, np.uint8)
    if mapped.ctypes.data % region.itemsize:
      return None
    return mapped.view(f'u{region.itemsize}')

  def verify_chunk(self, bits: np.ndarray, chunk: Chunk, size: int) -> str:
    """Returns the digest of a chunk's bits, for which `size` bytes were received.

    Raises:
      CorruptWeightsError: It is not the digest that was published.
    """
    digest = checksum(bits)
    if digest != chunk.digest:
      raise CorruptWeightsError('a chunk has another digest than was published')
    self._count(size, 0)
    return digest

  def release_blobs(self) -> None:
    """Releases the blobs that were read."""
    with self._lock:
      self._blobs.clear()

  def _apply_step(
    self, out: np.ndarray, writer: str, version: int, payload: Payload | None
  ) -> int:
    """Goes one version further; returns the number of bytes that it took."""
    if payload is None:
      raise CorruptWeightsError(f'version {version} lacks a payload')
    if payload.codec == SAME:
      return 0
    data = read_payload(self._blob(writer, version, payload.blob), payload)
    if payload.codec == RAW:
      _copy_bytes(out, data)  # its checksum is the chunk's digest, compared afterwards
    elif payload.codec == SPARSE and checksum(data) == payload.checksum:
      apply_delta(out, data)
    else:
      raise CorruptWeightsError(
        f'version {version} has a payload with another checksum'
      )
    return payload.size

  def _blob(self, writer: str, version: int, number: int) -> memoryview:
    key = version, number
    with self._lock:
      blob = self._blobs.get(key)
    if blob is None:
      blob = self._transport.get(blob_key(self._part, writer, version, number))
      with self._lock:
        self._blobs[key] = blob
    return blob

  def _count(self, received_bytes: int, attempt: int) -> None:
    with self._lock:
      self.received_bytes += received_bytes
      self.repeats += attempt > 0


def _chunk_steps(
  chain: Sequence[Manifest], index: ChunkIndex, starts_full: bool
) -> tuple[list[tuple[int, Payload | None]], Chunk]:
  """Returns (version, payload) of a chunk along a chain, and the chunk at its end."""
  region, number = index
  chunks = [manifest.regions[region][1][number] for manifest in chain]
  steps = [(m.version, c.delta) for m, c in zip(chain, chunks, strict=True)]
  if starts_full:
    steps[0] = chain[0].version, chunks[0].full
  return steps, chunks[-1]


def _copy_bytes(out: np.ndarray, data: memoryview) -> None:
  if len(data) != out.nbytes:
    raise CorruptWeightsError(f'{len(data)} bytes for a chunk of {out.nbytes}')
  np.copyto(out.view(np.uint8), np.frombuffer(data, np.uint8))


def _num_bytes(chain: Sequence[Manifest], starts_full: bool) -> int:
  """Returns the bytes of a chain, without manifests."""
  first = [c.full if starts_full else c.delta for c in chain[0].chunks()]
  rest = [c.delta for manifest in chain[1:] for c in manifest.chunks()]
  return sum(payload.size for payload in (*first, *rest) if payload)
