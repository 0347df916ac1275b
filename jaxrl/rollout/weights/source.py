"""What a receiver sees of one publisher: manifests and chunks, checked or refused."""

import threading
from collections.abc import Sequence

import numpy as np

from jaxrl.rollout.weights import delta, names
from jaxrl.rollout.weights.blobs import cut
from jaxrl.rollout.weights.errors import Corrupt
from jaxrl.rollout.weights.transport import Transport
from jaxrl.rollout.weights.wire import (
  RAW,
  SAME,
  SPARSE,
  Chunk,
  Manifest,
  Payload,
  checksum,
  unframe,
)


class Source:
  """part: which publisher. tries: how often anything is asked for before it counts as
  missing. repeats, received: how often something was asked for again, and the bytes
  of all payloads used, since this was made.
  """

  def __init__(self, transport: Transport, part: int, tries: int):
    self._transport, self._part, self._tries = transport, part, tries
    self._blobs: dict[tuple[int, int], memoryview] = {}
    self._lock = threading.Lock()
    self.repeats, self.received = 0, 0

  def head(self) -> tuple[str, int] | None:
    """(run, newest version); None before there is one, or when it cannot be read."""
    try:
      body = unframe(self._transport.get(names.head(self._part)))
      return str(body['run']), int(body['version'])
    except (KeyError, Corrupt):
      return None

  def manifest(self, run: str, version: int, tries: int | None = None) -> Manifest:
    """Raises Corrupt when it is missing or broken after all tries."""
    problem = Corrupt(f'version {version} has no manifest')
    for attempt in range(tries or self._tries):
      try:
        data = self._transport.get(names.manifest(self._part, run, version))
        found = Manifest.decode(data)
        self._count(len(data), attempt)
        if found.version == version:
          return found
      except KeyError:
        continue
      except Corrupt as error:
        problem = error
    raise problem

  def route(
    self, run: str, version: int, held: Manifest | None
  ) -> tuple[list[Manifest], bool]:
    """The versions to go through, ascending, and whether the first is read in full.

    The cheaper of two ways: from the version held, or from the newest full one.
    Raises Corrupt when manifests are missing.
    """
    path = [self.manifest(run, version)]
    full: list[Manifest] | None = None
    while True:
      first = path[0]
      if full is None and first.complete:
        full = list(path)
      if held is not None and first.base == held.version:
        dearer = full is not None and _bytes(path, False) > _bytes(full, True)
        if not dearer and first.layout() == held.layout():
          return path, False
      behind = held is not None and (first.base or 0) > held.version
      if first.base is None or (full is not None and not behind):
        break
      try:
        path.insert(0, self.manifest(run, first.base, 1 if full else None))
      except Corrupt:
        if full is None:
          raise
        break
    if full is None:
      raise Corrupt(f'version {version} leads back to no full version')
    return full, True

  def fill(
    self,
    out: np.ndarray,
    old: np.ndarray | None,
    run: str,
    route: Sequence[Manifest],
    place: tuple[int, int],
  ) -> str:
    """Makes `out` the contents of a chunk at the end of a route; returns its digest.

    out: words `[n]`. old: those held, None when the route starts in full. place: the
    chunk's region and number. Raises Corrupt, and `out` is spoilt, when what came, or
    what was put together from it, is not what was published.
    """
    steps, chunk = _steps(route, place, old is None)
    raw = [i for i, (_, step) in enumerate(steps) if step and step.codec == RAW]
    steps = steps[raw[-1] :] if raw else steps
    for attempt in range(self._tries):
      self._count(0, attempt)
      try:
        if not raw and old is not None:
          np.copyto(out, old)
        size = sum(self._step(out, run, *step) for step in steps)
        return self.checked(out, chunk, size)
      except (KeyError, Corrupt):
        self.end()
    name = names.repair(self._part, run, route[-1].version, *place)
    payload = Payload(RAW, size=out.nbytes)
    try:
      _copy(out, cut(self._transport.get(name), payload))
    except KeyError:
      raise Corrupt(f'chunk {place} of version {route[-1].version} is lost') from None
    return self.checked(out, chunk, out.nbytes)

  def view(
    self, run: str, route: Sequence[Manifest], number: int, full: bool
  ) -> np.ndarray | None:
    """Words `[n]` of a region at the end of a route, read-only and not checked, where
    they lie in memory that all share; None where `fill` must put them together.

    full: the route starts in full.
    """
    region, chunks = route[-1].regions[number]
    if not self._transport.mapped or not chunks:
      return None
    runs = []
    for i in range(len(chunks)):
      steps, chunk = _steps(route, (number, i), full)
      moved = [(v, p) for v, p in steps if p is None or p.codec != SAME]
      version, payload = moved[-1] if moved else (0, None)
      size = chunk.count * region.itemsize
      if payload is None or (payload.codec, payload.size) != (RAW, size):
        return None
      runs.append((version, payload.blob, payload.at - chunk.start * region.itemsize))
    if len(set(runs)) > 1:
      return None
    (version, blob, at), size = runs[0], region.size * region.itemsize
    try:
      data = cut(self._blob(run, version, blob), Payload(RAW, blob, at, size))
    except (KeyError, Corrupt):
      return None
    found = np.frombuffer(data, np.uint8)
    if found.ctypes.data % region.itemsize:
      return None
    return found.view(f'u{region.itemsize}')

  def end(self) -> None:
    """Lets go of the blobs read."""
    with self._lock:
      self._blobs.clear()

  def _step(
    self, out: np.ndarray, run: str, version: int, payload: Payload | None
  ) -> int:
    """Goes one version on; returns the bytes that it took."""
    if payload is None:
      raise Corrupt(f'version {version} lacks a payload')
    if payload.codec == SAME:
      return 0
    data = cut(self._blob(run, version, payload.blob), payload)
    if payload.codec == RAW:
      _copy(out, data)  # its checksum is the contents' digest, compared afterwards
    elif payload.codec == SPARSE and checksum(data) == payload.checksum:
      delta.apply(out, data)
    else:
      raise Corrupt(f'version {version} has a payload with another checksum')
    return payload.size

  def checked(self, out: np.ndarray, chunk: Chunk, size: int) -> str:
    """The digest of a chunk's words, which took `size` bytes; Corrupt for another's."""
    found = checksum(out)
    if found != chunk.digest:
      raise Corrupt('a chunk has another digest than was published')
    self._count(size, 0)
    return found

  def _blob(self, run: str, version: int, number: int) -> memoryview:
    key = version, number
    with self._lock:
      found = self._blobs.get(key)
    if found is None:
      found = self._transport.get(names.blob(self._part, run, version, number))
      with self._lock:
        self._blobs[key] = found
    return found

  def _count(self, received: int, attempt: int) -> None:
    with self._lock:
      self.received += received
      self.repeats += attempt > 0


def _steps(
  route: Sequence[Manifest], place: tuple[int, int], full: bool
) -> tuple[list[tuple[int, Payload | None]], Chunk]:
  """(version, payload) of a chunk along a route, and the chunk at its end."""
  chunks = [manifest.regions[place[0]][1][place[1]] for manifest in route]
  steps = [(m.version, c.delta) for m, c in zip(route, chunks, strict=True)]
  if full:
    steps[0] = route[0].version, chunks[0].full
  return steps, chunks[-1]


def _copy(out: np.ndarray, data: memoryview) -> None:
  if len(data) != out.nbytes:
    raise Corrupt(f'{len(data)} bytes for a chunk of {out.nbytes}')
  np.copyto(out.view(np.uint8), np.frombuffer(data, np.uint8))


def _bytes(route: Sequence[Manifest], full: bool) -> int:
  """What a route takes, without manifests."""
  first = [c.full if full else c.delta for c in route[0].chunks()]
  rest = [c.delta for manifest in route[1:] for c in manifest.chunks()]
  return sum(payload.size for payload in (*first, *rest) if payload)
