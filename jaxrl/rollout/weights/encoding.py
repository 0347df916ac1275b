"""From shards to chunks, coded against the version before, to blobs and a manifest."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl.rollout.weights import delta
from jaxrl.rollout.weights.blobs import Blob, Packer, label
from jaxrl.rollout.weights.layout import Region, Shard
from jaxrl.rollout.weights.transport import Buffer
from jaxrl.rollout.weights.wire import (
  RAW,
  SAME,
  SPARSE,
  Chunk,
  Manifest,
  Payload,
  checksum,
)

Layout = list[tuple[Region, list[tuple[int, int]]]]  # (start, count) of its chunks


@dataclasses.dataclass(frozen=True)
class Before:
  """The version before: what a new one is encoded against."""

  manifest: Manifest
  shards: Sequence[Shard]


@dataclasses.dataclass(frozen=True)
class Coded:
  """A chunk's words `[n]`, their digest, and `data`, the payload of its codec.

  changed: elements that differ from the version before; n when there is none.
  """

  region: Region
  start: int
  words: np.ndarray
  digest: str
  codec: str
  data: Any
  changed: int


def plan(shards: Sequence[Shard], chunk_bytes: int) -> Layout:
  """The chunks that shards are cut into."""
  return [(shard.region, list(shard.region.cut(chunk_bytes))) for shard in shards]


def encode(
  shards: Sequence[Shard],
  layout: Layout,
  base: Before | None,
  run: Callable[..., Iterator[Coded]] = map,
  *,
  whole: bool = False,
) -> list[Coded]:
  """Every chunk, as its difference where that has fewer bytes and a base is there.

  layout: the shards' own, as `plan` gives it. base: of the same layout. run: a `map`,
  of threads perhaps. whole: in full all the same; what changed is only counted.
  """
  olds = [s.words for s in base.shards] if base else [None] * len(shards)
  digests: Iterator[str | None] = itertools.repeat(None)
  if base:
    digests = iter([c.digest for c in base.manifest.chunks()])
  work = []
  for shard, (region, cuts), old in zip(shards, layout, olds, strict=True):
    told = shard.changed if old is not None and shard.since is old else None
    for start, count in cuts:
      box = slice(start, start + count)
      past = None if old is None else old[box]
      places = None if told is None else _within(told, start, count)
      args = region, start, shard.words[box], past, next(digests), places, whole
      work.append(args)
  return list(run(lambda args: _encode(*args), work))


def _within(changed: np.ndarray, start: int, count: int) -> np.ndarray:
  """Those of ascending indices that lie in a chunk, counted from its start."""
  low, high = np.searchsorted(changed, (start, start + count))
  return changed[low:high] - start


def _encode(
  region: Region,
  start: int,
  words: np.ndarray,
  old: np.ndarray | None,
  old_digest: str | None,
  places: np.ndarray | None,
  whole: bool,
) -> Coded:
  if old is None or old_digest is None:
    return Coded(region, start, words, checksum(words), RAW, words, words.size)
  indices = delta.changed(old, words) if places is None else places
  if whole:
    digest = checksum(words) if indices.size else old_digest
    return Coded(region, start, words, digest, RAW, words, indices.size)
  if not indices.size:
    return Coded(region, start, words, old_digest, SAME, b'', 0)
  data = delta.encode(old, words, indices)
  codec = RAW if data is None else SPARSE
  data = words if data is None else data
  return Coded(region, start, words, checksum(words), codec, data, indices.size)


def write(
  version: int,
  base: int | None,
  coded: Sequence[Coded],
  *,
  regions: Sequence[Region],
  full: Callable[[int], bool],
  put: Callable[[int, list[Buffer]], int],
  blob_bytes: int,
  together: bool = False,
) -> tuple[Manifest, int]:
  """Puts the blobs. Returns the manifest, and the bytes of the deltas' blobs.

  base: the version that `coded` was encoded against. full: whether to write the full
  bytes as well, given the deltas' bytes. put: takes a blob's number and its bytes in
  pieces, and returns how many. together: a region's full bytes lie in one run of one
  blob, however large that gets; so do those of a delta that is nothing else.
  """
  writer = _Writer(Packer(blob_bytes), put, together)
  groups = [list(them) for _, them in itertools.groupby(coded, lambda c: c.region)]
  steps = [writer.lay(them, [c.codec for c in them]) for them in groups]
  writer.flush(writer.packer.finish())
  delta_bytes = writer.sent
  wholes: list[Sequence[Payload | None]] = [
    [p if p.codec == RAW else None for p in them] for them in steps
  ]
  if base is None or full(delta_bytes):
    wholes = [writer.complete(*pair) for pair in zip(groups, wholes, strict=True)]
    writer.flush(writer.packer.finish())
  chunks: dict[Region, list[Chunk]] = {region: [] for region in regions}
  payloads = zip(itertools.chain(*wholes), itertools.chain(*steps), strict=True)
  for c, (whole, step) in zip(coded, payloads, strict=True):
    step = None if base is None else step
    chunks[c.region].append(Chunk(c.start, c.words.size, c.digest, whole, step))
  listed = tuple((region, tuple(them)) for region, them in chunks.items())
  return Manifest(version, base, listed), delta_bytes


@dataclasses.dataclass
class _Writer:
  """Places payloads and puts the blobs; sent: bytes of these."""

  packer: Packer
  put: Callable[[int, list[Buffer]], int]
  together: bool
  sent: int = 0

  def flush(self, blob: Blob | None) -> None:
    if blob is not None:
      self.sent += self.put(*blob)

  def lay(self, them: list[Coded], codecs: list[str]) -> list[Payload]:
    """The payloads of a region's chunks, in one run if they are all of its bytes."""
    if self.together and set(codecs) == {RAW}:
      size = sum(c.words.nbytes for c in them)
      self.flush(self.packer.reserve(size, them[0].region.itemsize))
    return [self._add(c, codec) for c, codec in zip(them, codecs, strict=True)]

  def complete(
    self, them: list[Coded], found: Sequence[Payload | None]
  ) -> Sequence[Payload | None]:
    """A region's full bytes; found: those of chunks that lie somewhere already."""
    if self.together and None in found:
      return self.lay(them, [RAW] * len(them))
    return [f or self._add(c, RAW) for f, c in zip(found, them, strict=True)]

  def _add(self, c: Coded, codec: str) -> Payload:
    if codec == SAME:
      return Payload(SAME)
    raw = codec == RAW
    data = c.words if raw else c.data
    name = label(c.region, c.start)
    sum_ = c.digest if raw else checksum(data)
    place, blob = self.packer.add(name, c.region, codec, data, sum_)
    self.flush(blob)
    return place
