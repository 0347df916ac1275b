"""Delta encoding turns shards into chunks that are encoded against the version before.

At the learning rates of reinforcement learning about one bf16 weight in a hundred
changes in a step, and most of those by one unit in the last place. A delta contains the
gaps between changed elements, usually one byte each, and the differences of their bits
read as integers, so that NaN, −0 and infinities are numbers like any other. Both are
compressed with zstd, which comes with pyarrow: as small as zlib, and eight times as
fast.

    changed, gap bytes, packed gap bytes: 3 × uint32 | gaps, zstd | differences, zstd
"""

import dataclasses
import functools
import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl.rollout.weights.manifest import (
  RAW,
  SAME,
  SPARSE,
  Blob,
  BlobPacker,
  Chunk,
  ChunkLayout,
  Manifest,
  Payload,
  checksum,
  chunk_label,
)
from jaxrl.rollout.weights.shards import Region, Shard
from jaxrl.rollout.weights.transport import Buffer, CorruptWeightsError

_HEADER = struct.Struct('<3I')
_LONG_GAP = 255  # a gap byte that says: add 255 and read the next one


# ---- The codec: two arrays of bits to a delta and back


@functools.cache
def _zstd() -> Any:
  import pyarrow

  return pyarrow.Codec('zstd', compression_level=1)


def find_changes(old: np.ndarray, new: np.ndarray) -> np.ndarray:
  """Returns the ascending indices where two unsigned arrays `[n]` differ."""
  return np.flatnonzero(old != new)


def encode_delta(old: np.ndarray, new: np.ndarray, indices: np.ndarray) -> bytes | None:
  """Encodes the difference between two arrays.

  Args:
    old: `[n]` unsigned integers, n < 2³².
    new: `[n]` unsigned integers.
    indices: Where they differ, as `find_changes` returns them.

  Returns:
    The delta; None if it is not smaller than `new`.
  """
  if _HEADER.size + indices.size >= new.nbytes:
    return None  # a gap takes at least a byte, before compression
  gaps = _pack_gaps(indices)
  packed = _zstd().compress(gaps, asbytes=True)
  values = _zstd().compress(_pack_values(old, new, indices), asbytes=True)
  if _HEADER.size + len(packed) + len(values) >= new.nbytes:
    return None
  header = _HEADER.pack(indices.size, gaps.size, len(packed))
  return b''.join((header, packed, values))


def apply_delta(target: np.ndarray, data: memoryview | bytes) -> None:
  """Turns the old array into the new one, in place.

  Args:
    target: `[n]` unsigned integers, the old array.
    data: What `encode_delta` returned.

  Raises:
    CorruptWeightsError: `data` is no delta for `target`, whose contents are then
      undefined.
  """
  data = memoryview(data)
  if len(data) < _HEADER.size:
    raise CorruptWeightsError('a delta without its header')
  count, gap_bytes, packed = _HEADER.unpack(data[: _HEADER.size])
  # No gaps take more bytes than this, so no header makes us allocate at will.
  if count > target.size or gap_bytes > count + target.size // _LONG_GAP:
    raise CorruptWeightsError(f'a delta of {count} changes for {target.size} elements')
  values_start = _HEADER.size + packed
  gaps = _decompress(data[_HEADER.size : values_start], gap_bytes)
  indices = _unpack_gaps(gaps, count)
  if count and indices[-1] >= target.size:
    raise CorruptWeightsError('a delta reaches past the end of its chunk')
  planes = _decompress(data[values_start:], count * target.itemsize)
  target[indices] += _unpack_values(planes, target.dtype)


def _decompress(data: memoryview, size: int) -> np.ndarray:
  if not size and not len(data):
    return np.empty(0, np.uint8)
  try:
    decompressed = _zstd().decompress(data, size)
  except Exception as error:
    raise CorruptWeightsError(f'a delta cannot be unpacked: {error}') from error
  array = np.frombuffer(decompressed, np.uint8)
  if array.size != size:
    raise CorruptWeightsError(
      f'a delta has {array.size} bytes where {size} were announced'
    )
  return array


def _pack_gaps(indices: np.ndarray) -> np.ndarray:
  """Returns the elements skipped before each change, `[≥ m]` uint8.

  Gaps of 255 and more take several bytes.
  """
  gaps = np.diff(indices, prepend=-1) - 1
  if not (gaps >= _LONG_GAP).any():
    return gaps.astype(np.uint8)
  ends = np.cumsum(gaps // _LONG_GAP + 1)
  packed = np.full(ends[-1], _LONG_GAP, np.uint8)
  packed[ends - 1] = gaps % _LONG_GAP
  return packed


def _unpack_gaps(gaps: np.ndarray, count: int) -> np.ndarray:
  """Returns the indices `[count]` int64."""
  is_last = gaps != _LONG_GAP
  ends = np.cumsum(gaps, dtype=np.int64)[is_last]
  if ends.size != count or (gaps.size and not is_last[-1]):
    raise CorruptWeightsError(f'a delta has {ends.size} places for {count} changes')
  return ends + np.arange(count)


def _pack_values(old: np.ndarray, new: np.ndarray, indices: np.ndarray) -> np.ndarray:
  """Returns the differences modulo 2ᵇ, `[m · itemsize]` uint8.

  Small differences of either sign become small numbers. All first bytes come first,
  then all second bytes, and so on.
  """
  step = new[indices] - old[indices]
  bits = 8 * step.itemsize
  signed = step.view(f'i{step.itemsize}')
  folded = (step << 1) ^ (signed >> (bits - 1)).view(step.dtype)
  planes = folded.astype(folded.dtype.newbyteorder('<')).view(np.uint8)
  return np.ascontiguousarray(planes.reshape(-1, step.itemsize).T).reshape(-1)


def _unpack_values(planes: np.ndarray, dtype: np.dtype) -> np.ndarray:
  rows = np.ascontiguousarray(planes.reshape(dtype.itemsize, -1).T)
  folded = rows.view(dtype.newbyteorder('<')).reshape(-1).astype(dtype)
  one = dtype.type(1)
  return (folded >> one) ^ (dtype.type(0) - (folded & one))


# ---- A version: shards to encoded chunks, to blobs and a manifest


@dataclasses.dataclass(frozen=True)
class BaseVersion:
  """The version before, which a new one is encoded against."""

  manifest: Manifest
  shards: Sequence[Shard]


@dataclasses.dataclass(frozen=True)
class EncodedChunk:
  """A chunk and its encoded bytes.

  Attributes:
    region: The region that it belongs to.
    start: First element.
    bits: `[n]` the bits of its elements.
    digest: Of `bits`.
    codec: How `data` is encoded.
    data: The payload.
    num_changed: Elements that differ from the version before; n if there is none.
  """

  region: Region
  start: int
  bits: np.ndarray
  digest: str
  codec: str
  data: Any
  num_changed: int


def plan_chunks(shards: Sequence[Shard], chunk_bytes: int) -> ChunkLayout:
  """Returns the chunks that shards are cut into, at most `chunk_bytes` each."""
  return [
    (shard.region, list(shard.region.chunk_bounds(chunk_bytes))) for shard in shards
  ]


def encode_chunks(
  shards: Sequence[Shard],
  layout: ChunkLayout,
  base: BaseVersion | None,
  run: Callable[..., Iterator[EncodedChunk]] = map,
  *,
  always_full: bool = False,
) -> list[EncodedChunk]:
  """Encodes every chunk, as a delta if there is a base and the delta is smaller.

  Args:
    shards: The new version.
    layout: Its chunks, as `plan_chunks` returns them.
    base: The version before, with the same layout.
    run: A `map`, which may use threads.
    always_full: Encode full bytes all the same; changes are only counted.

  Returns:
    The chunks in order.
  """
  base_bits = [s.bits for s in base.shards] if base else [None] * len(shards)
  base_digests: Iterator[str | None] = itertools.repeat(None)
  if base:
    base_digests = iter([c.digest for c in base.manifest.chunks()])
  work = []
  for shard, (region, bounds), old in zip(shards, layout, base_bits, strict=True):
    compared = old is not None and shard.base_bits is old
    changed = shard.changed_indices if compared else None
    for start, count in bounds:
      box = slice(start, start + count)
      old_chunk = None if old is None else old[box]
      indices = None if changed is None else _indices_within(changed, start, count)
      digest = next(base_digests)
      bits = shard.bits[box]
      work.append((region, start, bits, old_chunk, digest, indices, always_full))
  return list(run(lambda args: _encode_chunk(*args), work))


def _indices_within(indices: np.ndarray, start: int, count: int) -> np.ndarray:
  """Returns those of ascending indices that lie in a chunk, relative to its start."""
  low, high = np.searchsorted(indices, (start, start + count))
  return indices[low:high] - start


def _encode_chunk(
  region: Region,
  start: int,
  bits: np.ndarray,
  old: np.ndarray | None,
  old_digest: str | None,
  indices: np.ndarray | None,
  always_full: bool,
) -> EncodedChunk:
  if old is None or old_digest is None:
    return EncodedChunk(region, start, bits, checksum(bits), RAW, bits, bits.size)
  if indices is None:
    indices = find_changes(old, bits)
  if always_full:
    digest = checksum(bits) if indices.size else old_digest
    return EncodedChunk(region, start, bits, digest, RAW, bits, indices.size)
  if not indices.size:
    return EncodedChunk(region, start, bits, old_digest, SAME, b'', 0)
  delta = encode_delta(old, bits, indices)
  codec, data = (RAW, bits) if delta is None else (SPARSE, delta)
  return EncodedChunk(region, start, bits, checksum(bits), codec, data, indices.size)


def write_version(
  version: int,
  base: int | None,
  encoded: Sequence[EncodedChunk],
  *,
  regions: Sequence[Region],
  should_write_full: Callable[[int], bool],
  put: Callable[[int, list[Buffer]], int],
  blob_bytes: int,
  contiguous: bool = False,
) -> tuple[Manifest, int]:
  """Writes the blobs of a version.

  Args:
    version: Its number.
    base: The version that `encoded` was encoded against; None for full bytes.
    encoded: The chunks in order.
    regions: All regions, in the order of the manifest.
    should_write_full: Whether to write the full bytes as well, given the bytes of the
      deltas.
    put: Stores a blob, given its number and its bytes in pieces, and returns how many.
    blob_bytes: The most bytes of a blob.
    contiguous: The full bytes of a region are contiguous in one blob, however large
      that gets. So are those of a delta that consists of nothing else.

  Returns:
    The manifest, and the bytes of the deltas' blobs.
  """
  writer = _BlobWriter(BlobPacker(blob_bytes), put, contiguous)
  groups = [list(group) for _, group in itertools.groupby(encoded, lambda c: c.region)]
  deltas = [writer.add_region(group, [c.codec for c in group]) for group in groups]
  writer.flush(writer.packer.finish())
  delta_bytes = writer.bytes_written
  fulls: list[Sequence[Payload | None]] = [
    [p if p.codec == RAW else None for p in payloads] for payloads in deltas
  ]
  if base is None or should_write_full(delta_bytes):
    fulls = [writer.complete_region(*pair) for pair in zip(groups, fulls, strict=True)]
    writer.flush(writer.packer.finish())
  chunks: dict[Region, list[Chunk]] = {region: [] for region in regions}
  payloads = zip(itertools.chain(*fulls), itertools.chain(*deltas), strict=True)
  for c, (full, delta) in zip(encoded, payloads, strict=True):
    if base is None:
      delta = None
    chunks[c.region].append(Chunk(c.start, c.bits.size, c.digest, full, delta))
  entries = tuple(
    (region, tuple(region_chunks)) for region, region_chunks in chunks.items()
  )
  return Manifest(version, base, entries), delta_bytes


@dataclasses.dataclass
class _BlobWriter:
  """Places payloads and stores the blobs."""

  packer: BlobPacker
  put: Callable[[int, list[Buffer]], int]
  contiguous: bool
  bytes_written: int = 0

  def flush(self, blob: Blob | None) -> None:
    if blob is not None:
      self.bytes_written += self.put(*blob)

  def add_region(self, chunks: list[EncodedChunk], codecs: list[str]) -> list[Payload]:
    """Adds a region's chunks, contiguously if they are all of its bytes."""
    if self.contiguous and set(codecs) == {RAW}:
      size = sum(c.bits.nbytes for c in chunks)
      self.flush(self.packer.reserve(size, chunks[0].region.itemsize))
    return [self._add(c, codec) for c, codec in zip(chunks, codecs, strict=True)]

  def complete_region(
    self, chunks: list[EncodedChunk], written: Sequence[Payload | None]
  ) -> Sequence[Payload | None]:
    """Adds a region's full bytes, except those of chunks that are written already."""
    if self.contiguous and None in written:
      return self.add_region(chunks, [RAW] * len(chunks))
    return [p or self._add(c, RAW) for p, c in zip(written, chunks, strict=True)]

  def _add(self, chunk: EncodedChunk, codec: str) -> Payload:
    if codec == SAME:
      return Payload(SAME)
    data = chunk.bits if codec == RAW else chunk.data
    data_checksum = chunk.digest if codec == RAW else checksum(data)
    label = chunk_label(chunk.region, chunk.start)
    payload, blob = self.packer.add(label, chunk.region, codec, data, data_checksum)
    self.flush(blob)
    return payload
