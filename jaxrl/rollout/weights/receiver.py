"""An engine's end: loads versions behind the one in use, and checks all of them."""

import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from jaxrl import processors
from jaxrl.rollout.weights.errors import Corrupt
from jaxrl.rollout.weights.layout import (
  Region,
  Shard,
  Window,
  assemble,
  flatten,
  overlap,
  words,
)
from jaxrl.rollout.weights.leases import Lease, Miss
from jaxrl.rollout.weights.source import Source
from jaxrl.rollout.weights.transport import Transport
from jaxrl.rollout.weights.wire import Manifest, checksum, digest
from jaxrl.types import Params

BEAT = 0.5  # seconds between two signs of life while a version is read


class Lost(Corrupt):
  """misses: the chunks that could not be had."""

  def __init__(self, message: str, misses: tuple[Miss, ...]):
    super().__init__(message)
    self.misses = misses


@dataclasses.dataclass(frozen=True)
class Loaded:
  """What loading a version took. full: from the full bytes, not by differences.

  repeats: how often something had to be asked for again.
  """

  version: int
  full: bool
  received_bytes: int
  repeats: int
  seconds: float


class Receiver:
  """Holds the newest version of a learner's weights.

  parts: processes of the learner, each a publisher. windows: by parameter, the slice
  of it that is wanted; others come whole. tries: how often a chunk is asked for before
  the publisher is told that it is missing. Threads take turns.
  """

  def __init__(
    self,
    transport: Transport,
    *,
    parts: int = 1,
    windows: Mapping[str, Window] | None = None,
    tries: int = 3,
    threads: int | None = None,
  ):
    threads = threads or min(4, processors.count())
    self._pool = concurrent.futures.ThreadPoolExecutor(threads, 'weights')
    self._windows = dict(windows or {})
    self._parts = [
      _Part(Source(transport, part, tries), Lease(transport, part), self._windows)
      for part in range(parts)
    ]
    self._lock = threading.Lock()
    self._newest: tuple[list[str], int] | None = None
    self.loaded: Loaded | None = None
    self.problem: Corrupt | None = None

  @property
  def version(self) -> int | None:
    """The version held; None before the first."""
    return None if self._newest is None else self._newest[1]

  @property
  def runs(self) -> list[str]:
    """Which publishers it is of: other ones after the learner was started again."""
    return [] if self._newest is None else self._newest[0]

  @property
  def digests(self) -> tuple[str, ...]:
    """Of what was loaded, one for each part, each equal to the one published."""
    return tuple(part.digest for part in self._parts)

  def poll(self) -> int | None:
    """Loads the newest version if it is another than the one held.

    Returns its number. None when there is no other, or when it could not be had whole:
    `problem` then says why, the publisher has been told, and nothing has changed.
    """
    with self._lock:
      return self._poll()

  def _poll(self) -> int | None:
    heads = [part.source.head() for part in self._parts]
    found = [head for head in heads if head is not None]
    if len(found) < len(heads):
      return None
    runs, version = [run for run, _ in found], min(newest for _, newest in found)
    if self._newest == (runs, version):
      return None
    begun = time.perf_counter()
    repeats = sum(part.source.repeats for part in self._parts)
    received = sum(part.source.received for part in self._parts)
    whole = [
      part.load(run, version, self._pool)
      for part, run in zip(self._parts, runs, strict=True)
    ]
    problems = [part.problem for part in self._parts if part.problem]
    self.problem = problems[0] if problems else None
    if not all(whole):
      return None
    for part in self._parts:
      part.swap()
    self._newest = runs, version
    self.loaded = Loaded(
      version,
      any(part.full for part in self._parts),
      sum(part.source.received for part in self._parts) - received,
      sum(part.source.repeats for part in self._parts) - repeats,
      time.perf_counter() - begun,
    )
    return version

  def params(self) -> Params:
    """The version held, as nested dicts of read-only arrays.

    They last until the version after the next one is loaded: whoever keeps them
    longer copies them. Raises LookupError before the first version.
    """
    if self._newest is None:
      raise LookupError('no weights have been received')
    shards = [shard for part in self._parts for shard in part.shards()]
    return assemble(shards, self._windows)

  def take(
    self, place: Callable[[Params], Params] | None = None
  ) -> tuple[list[str], int, Params]:
    """(runs, version, params) as they belong together, nothing loaded meanwhile.

    place: turns the host's arrays into what is returned, copies perhaps.
    """
    with self._lock:
      params = self.params()
      assert self._newest is not None
      return *self._newest, params if place is None else place(params)

  def digest_of(self, params: Params) -> tuple[str, ...]:
    """What `digests` would be if `params`, of the version held, had been loaded.

    A region of which a window cuts off some counts as it was published.
    """
    with self._lock:
      leaves = flatten(params)
      return tuple(part.digest_of(leaves, self._pool) for part in self._parts)

  def close(self) -> None:
    """Takes leave of the publisher; the arrays handed out remain."""
    for part in self._parts:
      part.lease.end()
    self._pool.shutdown()


class _Part:
  """One publisher's share: two sets of arrays, of which one is in use.

  An array is a buffer of this receiver's own, or a read-only view of shared memory.
  """

  def __init__(self, source: Source, lease: Lease, windows: Mapping[str, Window]):
    self.source, self.lease, self._windows = source, lease, windows
    self.digest, self.full = '', False
    self.problem: Corrupt | None = None
    self._held: Manifest | None = None
    self._run = ''
    self._front: list[np.ndarray | None] = []
    self._back: list[np.ndarray | None] = []
    self._next: tuple[str, Manifest] | None = None

  def load(
    self, run: str, version: int, pool: concurrent.futures.ThreadPoolExecutor
  ) -> bool:
    """Fills the buffers that are not in use; False, with `problem`, if it cannot."""
    self._next, self.problem = None, None
    self.lease.begin(run, version)
    held = self._held if run == self._run else None
    try:
      if held is not None and held.version == version:  # another part was late
        self._next = run, held
        self._back = [x.copy() if _own(x) else x for x in self._front]
        return True
      route, self.full = self.source.route(run, version, held)
    except Corrupt as error:
      self.problem = error
      self.lease.complain(manifest=True)
      return False
    try:
      self._fill(run, route, pool)
    except Lost as error:
      self.problem = error
      self.lease.complain(error.misses)
      return False
    finally:
      self.source.end()
    self._next = run, route[-1]
    self.lease.done()
    return True

  def swap(self) -> None:
    """Puts in use what was loaded, in one go."""
    assert self._next is not None
    self._run, self._held = self._next
    self._front, old = self._back, self._front
    self._back = [x if _own(x) else None for x in old]  # what is mapped may be freed
    self.digest = self._held.digest

  def shards(self) -> Iterator[Shard]:
    """What is in use of what is wanted."""
    assert self._held is not None
    for (region, _), flat in zip(self._held.regions, self._front, strict=True):
      if flat is not None:
        yield Shard(region, flat)

  def digest_of(
    self, leaves: Mapping[str, Any], pool: concurrent.futures.ThreadPoolExecutor
  ) -> str:
    """The digest of the regions as they lie in `leaves`, by dotted name."""
    assert self._held is not None

    work: list[np.ndarray | str] = []
    for region, chunks in self._held.regions:
      met = overlap(region, self._windows.get(region.name))
      whole = met is not None and all(
        s.stop - s.start == n for s, n in zip(met[1], region.extent, strict=True)
      )
      if met is None or not whole:
        work += [c.digest for c in chunks]
        continue
      flat = words(np.ascontiguousarray(np.asarray(leaves[region.name])[met[0]]))
      work += [flat[c.start : c.start + c.count] for c in chunks]
    found = pool.map(lambda x: x if isinstance(x, str) else checksum(x), work)
    return digest(
      (region, [(c.start, next(found)) for c in chunks])
      for region, chunks in self._held.regions
    )

  def _fill(
    self,
    run: str,
    route: list[Manifest],
    pool: concurrent.futures.ThreadPoolExecutor,
  ) -> None:
    """Raises Lost unless every chunk wanted, and the whole, are what was published."""
    target = route[-1]
    wanted = [r for r, (region, _) in enumerate(target.regions) if self._wanted(region)]
    views = {r: self.source.view(run, route, r, self.full) for r in wanted}
    views = {r: found for r, found in views.items() if found is not None}

    def check(place: Miss) -> str:
      chunk = target.regions[place[0]][1][place[1]]
      found = views[place[0]][chunk.start : chunk.start + chunk.count]
      return self.source.checked(found, chunk, found.nbytes)

    def fill(place: Miss) -> str:
      r, i = place
      chunk = target.regions[r][1][i]
      box = slice(chunk.start, chunk.start + chunk.count)
      out, old = self._back[r], None if self.full else self._front[r]
      assert out is not None
      return self.source.fill(
        out[box], None if old is None else old[box], run, route, place
      )

    results = self._each(check, target, views, pool)
    for (r, _), result in results.items():
      if isinstance(result, Corrupt):
        views.pop(r, None)  # to be put together, from what is sent again perhaps
    self._back = _buffers(target, wanted, views, self._back)
    rest = [r for r in wanted if r not in views]
    results |= self._each(fill, target, rest, pool)
    misses = tuple(p for p, result in results.items() if isinstance(result, Corrupt))
    if misses:
      raise Lost(f'version {target.version}: {results[misses[0]]}', misses)
    found = [
      (region, [(c.start, results.get((r, i), c.digest)) for i, c in enumerate(chunks)])
      for r, (region, chunks) in enumerate(target.regions)
    ]
    if digest(found) != target.digest:  # pyright: ignore
      raise Lost(f'version {target.version}: another digest than published', ())

  def _each(
    self,
    run: Callable[[Miss], str],
    target: Manifest,
    regions: Iterable[int],
    pool: concurrent.futures.ThreadPoolExecutor,
  ) -> dict[Miss, str | Corrupt]:
    """What `run` makes of every chunk of some regions, its Corrupt too."""
    work = [(r, i) for r in regions for i in range(len(target.regions[r][1]))]
    # Not where others begin, so that each may have from another what it has not yet.
    first = self.lease.number % max(len(work), 1)
    work = work[first:] + work[:first]

    def one(place: Miss) -> str | Corrupt:
      try:
        return run(place)
      except Corrupt as error:
        return error

    results, beat = {}, time.monotonic()
    for place, result in zip(work, pool.map(one, work), strict=True):
      results[place] = result
      if time.monotonic() - beat > BEAT:
        beat = time.monotonic()
        self.lease.beat()
    return results

  def _wanted(self, region: Region) -> bool:
    window = self._windows.get(region.name)
    return not region.size or overlap(region, window) is not None


def _own(array: np.ndarray | None) -> TypeGuard[np.ndarray]:
  """Whether this receiver may write to it."""
  return array is not None and array.flags.writeable


def _buffers(
  manifest: Manifest,
  wanted: Sequence[int],
  views: Mapping[int, np.ndarray],
  before: list[np.ndarray | None],
) -> list[np.ndarray | None]:
  """The views, and room for the other regions wanted, the old where it fits."""
  old = dict(enumerate(before))
  made: list[np.ndarray | None] = [None] * len(manifest.regions)
  for r in wanted:
    region, spare = manifest.regions[r][0], old.get(r)
    kind = np.dtype(f'u{region.itemsize}')
    fits = _own(spare) and (spare.size, spare.dtype) == (region.size, kind)
    made[r] = views[r] if r in views else spare if fits else np.empty(region.size, kind)
  return made
