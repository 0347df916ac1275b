"""Who sits in which slot of the cache, and what the cache still remembers.

A slot keeps the keys and values of its prompt until another prompt takes it over, even
after its request has ended: decoding writes only behind the prompt. So a prompt that
lies in any slot, at the same weights version, is copied instead of computed.
"""

import asyncio
import collections
import dataclasses
import itertools
from collections.abc import Iterable

import numpy as np

from jaxrl.types import Completion, SamplingParams


@dataclasses.dataclass(eq=False)
class Request:
  """One sequence on its way. `prompt` is int32 `[n]`; `budget` its most new tokens.

  routed: the experts its tokens took, pieces `[·, L, k]`; none if they are not kept.
  """

  name: str
  prompt: np.ndarray
  sampling: SamplingParams
  budget: int
  future: asyncio.Future
  tokens: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  versions: list[int] = dataclasses.field(default_factory=list)
  routed: list[np.ndarray] = dataclasses.field(default_factory=list)
  waiters: int = 0

  @property
  def text(self) -> bytes:
    """The prompt as a dictionary key."""
    return self.prompt.tobytes()

  @property
  def written(self) -> list[int]:
    """The completion from its very start, with what the prompt ends in of it."""
    first = self.sampling.first
    return [*self.prompt[-first:].tolist(), *self.tokens] if first else self.tokens

  def extend(self, tokens: list[int], logprobs: list[float], version: int) -> None:
    self.tokens += tokens
    self.logprobs += logprobs
    self.versions += [version] * len(tokens)

  def cut(self, length: int) -> None:
    """Forgets what came after the first `length` tokens."""
    for column in (self.tokens, self.logprobs, self.versions):
      del column[length:]

  def finish(self, reason: str) -> None:
    """Answers the caller; later calls do nothing."""
    if not self.future.done():
      self.future.set_result(self.so_far(reason))

  def so_far(self, reason: str = 'abort') -> Completion:
    fed = len(self.prompt) + len(self.tokens) - 1
    routed = np.concatenate(self.routed)[:fed] if self.routed else None
    return Completion(
      tokens=np.asarray(self.tokens, np.int32),
      logprobs=np.asarray(self.logprobs, np.float32),
      versions=np.asarray(self.versions, np.int32),
      finish_reason=reason,
      routed_experts=routed,
    )

  def fail(self, error: BaseException) -> None:
    if not self.future.done():
      self.future.set_exception(error)


@dataclasses.dataclass(frozen=True)
class Admission:
  """What to do on the device to seat requests.

  prefill: (slot, prompt) to compute. copies: (from slot, to slot, prompt length) to
  copy after that. seats: (slot, request) to start.
  """

  prefill: list[tuple[int, np.ndarray]]
  copies: list[tuple[int, int, int]]
  seats: list[tuple[int, Request]]


class SlotTable:
  """Slots 0 … num_slots − 1: each free or held by a request.

  lanes: of as many slots each, in a row; a prompt is copied within its lane alone.
  """

  def __init__(self, num_slots: int, lanes: int = 1):
    self._lane_size, self._lanes = num_slots // lanes, lanes
    self.owner: list[Request | None] = [None] * num_slots
    self._content: list[tuple[int, bytes] | None] = [None] * num_slots
    self._home: dict[tuple[int, bytes], set[int]] = {}
    self._used = [0] * num_slots
    self._clock = itertools.count(1)

  @property
  def busy(self) -> int:
    return sum(owner is not None for owner in self.owner)

  def free(self, slot: int) -> None:
    self.owner[slot] = None

  def find(self, request: Request) -> int | None:
    return self.owner.index(request) if request in self.owner else None

  def admit(self, requests: Iterable[Request], version: int) -> Admission:
    """Seats `requests`, which must not outnumber the free slots."""
    plan = Admission([], [], [])
    vacant = {slot for slot, owner in enumerate(self.owner) if owner is None}
    for request in requests:
      content = (version, request.text)
      slot = self._seat(content, vacant)
      source = self._source(content, vacant, slot)
      vacant.discard(slot)
      if self._content[slot] != content:
        length = len(request.prompt)
        if length > 1 and source is None:
          plan.prefill.append((slot, request.prompt))
        elif length > 1 and source is not None:
          plan.copies.append((source, slot, length))
        self._fill(slot, content)
      self._used[slot] = next(self._clock)
      self.owner[slot] = request
      plan.seats.append((slot, request))
    return plan

  def _source(
    self, content: tuple[int, bytes], vacant: set[int], slot: int
  ) -> int | None:
    """A slot in use that holds `content`, in the lane of `slot`: no prefill of this
    turn overwrites it.
    """
    lane = self._lane(slot)
    homes = self._home.get(content, set()) - vacant
    return min((home for home in homes if self._lane(home) == lane), default=None)

  def _seat(self, content: tuple[int, bytes], vacant: set[int]) -> int:
    """A vacant slot: one that holds `content`, else, in the lane that is best for it,
    the one used longest ago.
    """
    homes = self._home.get(content, set()) & vacant
    if not homes and self._lanes > 1:
      lane = self._best_lane(content, vacant)
      homes = {slot for slot in vacant if self._lane(slot) == lane}
    return min(homes or vacant, key=lambda slot: (self._used[slot], slot))

  def _best_lane(self, content: tuple[int, bytes], vacant: set[int]) -> int:
    """The one with most vacant slots; one where `content` lies may have fewer, by half
    a lane: groups up to that stay together, and lanes are as busy as each other.
    """
    free = collections.Counter(self._lane(slot) for slot in vacant)
    holding = {self._lane(slot) for slot in self._home.get(content, ())}
    for lane in holding & free.keys():
      free[lane] += self._lane_size // 2
    return min(free, key=lambda lane: (-free[lane], lane))

  def _lane(self, slot: int) -> int:
    return slot // self._lane_size

  def _fill(self, slot: int, content: tuple[int, bytes]) -> None:
    old = self._content[slot]
    if old is not None:
      self._home[old].discard(slot)
      if not self._home[old]:
        del self._home[old]
    self._content[slot] = content
    self._home.setdefault(content, set()).add(slot)
