"""Slots in equal lanes, each decoded by a thread of its own.

A decode step of a small model is a hundred operations of microseconds, and XLA's CPU
backend runs one after the other: the products are shared out between its threads, what
lies between them is not. Two programs of half the slots keep two processors busy. On
other devices, and where few slots would be left to a lane, there is one lane, and this
adds nothing.
"""

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl import processors
from jaxrl.models.cache import Cache
from jaxrl.rollout.programs import Programs, Rows
from jaxrl.types import Array, Params

SLOTS = 32  # of a lane, at least: all its slots read the weights together
Decoded = tuple[list[Cache], list[Rows], list[Any], list[Any], list[Any]]


def count_lanes(num_slots: int, platform: str, devices: int, exact: bool) -> int:
  """How many lanes `num_slots` are best cut into on so many devices of a platform.

  exact: one, for it decodes `num_slots` rows as its learner scores them.
  """
  if platform != 'cpu' or devices > 1 or exact:
    return 1
  most = min(processors.count(), num_slots // SLOTS)
  return next((n for n in range(most, 1, -1) if num_slots % n == 0), 1)


def refuses(lanes: int, num_slots: int, *, exact: bool, devices: int = 1) -> str:
  """Why so many lanes cannot be, '' where they can."""
  if lanes < 1 or num_slots % lanes:
    return f'num_slots={num_slots} does not divide into lanes={lanes}'
  if exact and lanes > 1:
    return f'exact mode decodes all slots in one program, not in lanes={lanes}'
  if devices > 1 and lanes > 1:
    return f'{devices} devices decode in one program, not in lanes={lanes}'
  return ''


class Lanes:
  """`count` lanes, `programs.num_slots` slots each: lane 0 has the first ones.

  Its methods are those of `Programs`, over lists of caches and rows by lane.
  """

  def __init__(self, programs: Programs, count: int):
    self.programs, self.count = programs, count
    self.num_slots = programs.num_slots * count
    # XLA runs what one thread has begun in order: a lane's thread is its own.
    make = concurrent.futures.ThreadPoolExecutor
    self._threads = [
      make(1, thread_name_prefix=f'lane {i}') for i in range(count if count > 1 else 0)
    ]

  def fresh(self) -> tuple[list[Cache], list[Rows]]:
    """Empty caches and idle rows, on the device."""
    caches, rows = zip(*(self.programs.fresh() for _ in self._each), strict=True)
    return list(caches), list(rows)

  def prefill(
    self,
    params: Params,
    caches: list[Cache],
    prompts: Sequence[tuple[int, np.ndarray]],
  ) -> list[Cache]:
    """Writes keys and values of all but the last token of each (slot, prompt)."""
    sorted_in: list[list[tuple[int, np.ndarray]]] = [[] for _ in self._each]
    for slot, prompt in prompts:
      lane, slot = self._at(slot)
      sorted_in[lane].append((slot, prompt))
    programs = self.programs
    return self._run(lambda i: programs.prefill(params, caches[i], sorted_in[i]))

  def copy(
    self, caches: list[Cache], copies: Sequence[tuple[int, int, int]]
  ) -> list[Cache]:
    """For each (source, target, length), both of one lane, in order: the source's first
    positions.
    """
    sorted_in: list[list[tuple[int, int, int]]] = [[] for _ in self._each]
    for source, target, length in copies:
      lane, source = self._at(source)
      other, target = self._at(target)
      if other != lane:
        raise ValueError(f'a copy from lane {lane} to lane {other}: each has its own')
      sorted_in[lane].append((source, target, length))
    return [
      self.programs.copy(cache, own) if own else cache
      for cache, own in zip(caches, sorted_in, strict=True)
    ]

  def place(self, rows: list[Rows], where: np.ndarray, new: Rows) -> list[Rows]:
    """`new` where `where` `[S]` bool is True, of all lanes' slots."""
    size = self.programs.num_slots
    spans = [slice(i * size, (i + 1) * size) for i in self._each]
    return [
      self.programs.place(own, where[span], new.cut(span)) if where[span].any() else own
      for own, span in zip(rows, spans, strict=True)
    ]

  def experts(self, caches: list[Cache], slot: int) -> Array | None:
    """`[C, L, k]` of a slot's tokens by position; None if the cache has them not."""
    lane, slot = self._at(slot)
    return self.programs.experts(caches[lane], slot)

  def decode(self, params: Params, caches: list[Cache], rows: list[Rows]) -> Decoded:
    """Up to `decode_steps` tokens for every busy slot; what `Programs.decode` returns,
    each a list by lane. Does not wait for the end: a train step that begins meanwhile
    shares the processors with it.
    """
    decode = self.programs.decode
    found = self._run(lambda i: decode(params, caches[i], rows[i]))
    caches, rows, tokens, logprobs, routed = map(list, zip(*found, strict=True))
    return caches, rows, tokens, logprobs, routed

  @property
  def _each(self) -> range:
    return range(self.count)

  def _at(self, slot: int) -> tuple[int, int]:
    return divmod(slot, self.programs.num_slots)

  def _run(self, begin: Callable[[int], Any]) -> list[Any]:
    """begin(lane) of each, on its own thread where there are several."""
    if not self._threads:
      return [begin(i) for i in self._each]
    begun = [t.submit(begin, i) for i, t in enumerate(self._threads)]
    concurrent.futures.wait(begun)  # also where one fails: none is left behind
    return [future.result() for future in begun]
