"""Scheduler: assigns waiting requests to cache slots and reuses cached prompts.

A slot keeps the keys and values of its prompt until another prompt overwrites them,
even after its request has ended, because decoding only writes behind the prompt. A
prompt that is cached in any slot, for the same weights version, is therefore copied
instead of computed. If prompts are computed in blocks, it takes over as many blocks as
it has in common with the beginning of any cached prompt.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl.rollout.engine.engine_base import EngineRequest
from jaxrl.types import Pixels

CacheKey = tuple[int, bytes]  # weights version and prompt, or its first blocks


@dataclasses.dataclass(frozen=True)
class SchedulerOutput:
  """The work of one decode dispatch.

  Attributes:
    weights_version: The version that the dispatch serves.
    prefill: (slot, prompt) pairs to compute.
    images: The images of those prompts that have any, by slot.
    copies: (source slot, target slot, prompt length) to copy after the prefill.
    assignments: (slot, request) pairs that start with this dispatch.
    freed_slots: Slots whose requests have ended since the last dispatch.
    owners: The request in each slot; None for an idle slot.
    staged: If prompts are computed in blocks, the `StagedPrompt`s, stage by stage:
      each may copy from those of earlier stages. `prefill` and `copies` are then empty.
    requests_waiting: True if requests are left in the queue, so that the results of
      the dispatch are needed before the next one.
  """

  weights_version: int
  prefill: list[tuple[int, np.ndarray]]
  copies: list[tuple[int, int, int]]
  assignments: list[tuple[int, EngineRequest]]
  freed_slots: set[int]
  owners: list[EngineRequest | None]
  requests_waiting: bool
  images: dict[int, tuple[Pixels, ...]] = dataclasses.field(default_factory=dict)
  staged: list[list[Any]] = dataclasses.field(default_factory=list)

  @property
  def num_prefilled_tokens(self) -> int:
    """Returns the number of prompt tokens that the dispatch computes."""
    staged = itertools.chain.from_iterable(self.staged)
    in_blocks = sum(len(one.prompt) - one.start for one in staged)
    return in_blocks + sum(len(prompt) for _, prompt in self.prefill)

  @property
  def num_reused_tokens(self) -> int:
    """Returns the number of prompt tokens that are already cached."""
    total = sum(len(request.prompt) for _, request in self.assignments)
    return total - self.num_prefilled_tokens

  def slot_update(self, make_idle: Callable[[], Any]) -> tuple[np.ndarray, Any] | None:
    """Collects which slots the dispatch overwrites: those assigned and those freed.

    Args:
      make_idle: Makes a numpy `SlotState` of idle slots.

    Returns:
      `[S]` bool, True for the slots to overwrite, and their new state; None if there
      are no such slots.
    """
    if not self.assignments and not self.freed_slots:
      return None
    new_state = make_idle()
    is_updated = np.zeros(len(new_state.tokens), bool)
    is_updated[list(self.freed_slots)] = True
    for slot, request in self.assignments:
      is_updated[slot] = True
      new_state.assign(slot, request)
    return is_updated, new_state


class Scheduler:
  """Queues requests and decides which slot each one is decoded in.

  Attributes:
    num_slots: Number of cache slots.
    waiting: Requests without a slot, in the order of their arrival.
  """

  def __init__(
    self,
    num_slots: int,
    num_partitions: int = 1,
    *,
    keeps_prompts: bool = True,
    prompt_block: int = 0,
  ):
    """Initializes a scheduler with an empty queue and empty slots.

    Args:
      num_slots: Number of cache slots.
      num_partitions: Number of equal ranges of slots. A prompt is only copied within
        its range.
      keeps_prompts: False for a cache in which decoding overwrites prompts. A prompt is
        then only copied before the dispatch that computes it decodes.
      prompt_block: Tokens of a block, in which prompts are then computed and shared; 0
        computes them whole.
    """
    self.num_slots = num_slots
    self._keeps_prompts = keeps_prompts
    self._prompt_block = prompt_block
    self.waiting: collections.deque[EngineRequest] = collections.deque()
    self._num_partitions = num_partitions
    self._partition_size = num_slots // num_partitions
    self.reset_slots()

  def reset_slots(self) -> None:
    """Empties all slots and forgets the cached prompts; the queue remains."""
    self._owners: list[EngineRequest | None] = [None] * self.num_slots
    self._forget_prompts()
    self._freed_slots: set[int] = set()
    self._last_used = [0] * self.num_slots
    self._clock = itertools.count(1)

  @property
  def running(self) -> list[EngineRequest]:
    """Returns the requests that have a slot."""
    return [request for request in self._owners if request is not None]

  @property
  def num_busy(self) -> int:
    """Returns the number of slots that are in use."""
    return len(self.running)

  def add(self, request: EngineRequest) -> None:
    """Appends a request to the queue."""
    self.waiting.append(request)

  def remove(self, request: EngineRequest) -> None:
    """Takes a request out of its slot or out of the queue.

    Args:
      request: A request that was added and not removed yet.
    """
    if request in self._owners:
      slot = self._owners.index(request)
      self._owners[slot] = None
      self._freed_slots.add(slot)
    else:
      self.waiting.remove(request)

  def schedule(
    self, weights_version: int, *, admit_waiting: bool = True
  ) -> SchedulerOutput:
    """Assigns waiting requests to the free slots, first come first served.

    Args:
      weights_version: The version of the next dispatch. Prompts that were cached for
        another version are computed again.
      admit_waiting: If False, the queue is left alone.

    Returns:
      What the next dispatch has to do.
    """
    if not self._keeps_prompts:
      self._forget_prompts()
    vacant = {slot for slot, owner in enumerate(self._owners) if owner is None}
    num_admitted = min(len(vacant), len(self.waiting)) if admit_waiting else 0
    prefill: list[tuple[int, np.ndarray]] = []
    copies: list[tuple[int, int, int]] = []
    assignments: list[tuple[int, EngineRequest]] = []
    staged: dict[int, Any] = {}  # `StagedPrompt`s by slot
    for _ in range(num_admitted):
      request = self.waiting.popleft()
      key = (weights_version, request.prompt_key)
      slot = self._choose_slot(key, vacant)
      if self._prompt_block and self._cached[slot] != key:
        one = self._stage(weights_version, request, vacant, slot)
        slot, staged[one.slot] = one.slot, one
      source = self._find_copy_source(key, vacant, slot)
      vacant.discard(slot)
      if self._prompt_block:
        self._set_cached(slot, key)
      elif self._cached[slot] != key:
        length = len(request.prompt)
        if length > 1 and source is None:
          prefill.append((slot, request.prompt))
        elif length > 1 and source is not None:
          copies.append((source, slot, length))
        self._set_cached(slot, key)
      self._last_used[slot] = next(self._clock)
      self._owners[slot] = request
      assignments.append((slot, request))
    freed_slots, self._freed_slots = self._freed_slots, set()
    computed = {slot for slot, _ in prefill}
    return SchedulerOutput(
      weights_version=weights_version,
      prefill=prefill,
      copies=copies,
      assignments=assignments,
      freed_slots=freed_slots,
      owners=list(self._owners),
      requests_waiting=bool(self.waiting),
      staged=_in_stages(staged),
      images={
        slot: request.images
        for slot, request in assignments
        if request.images and slot in computed
      },
    )

  def _stage(
    self, version: int, request: EngineRequest, vacant: set[int], slot: int
  ) -> Any:
    """Finds what a prompt can take over, from a vacant slot or by a copy to `slot`."""
    from jaxrl.rollout.engine.prompt_blocks import StagedPrompt  # most have whole ones

    prompt, key = request.prompt, (version, request.prompt_key)
    if (source := self._find_copy_source(key, vacant, slot)) is not None:
      return StagedPrompt(slot, prompt, len(prompt), source)
    for blocks in reversed(self._block_keys(key)):
      start = len(blocks[1]) // prompt.itemsize
      holders = self._block_index.get(blocks, set())
      if kept := holders & vacant:
        return StagedPrompt(self._least_recent(kept), prompt, start, None)
      if (source := self._source_in(holders - vacant, slot)) is not None:
        return StagedPrompt(slot, prompt, start, source)
    return StagedPrompt(slot, prompt, 0, None)

  def _block_keys(self, key: CacheKey) -> list[CacheKey]:
    """Returns the keys of a prompt's first blocks; its last token is in none."""
    (version, prompt), width = key, np.dtype(np.int32).itemsize
    size, end = self._prompt_block * width, len(prompt) - width
    return [(version, prompt[:i]) for i in range(size, end + 1, size)] if size else []

  def _forget_prompts(self) -> None:
    self._cached: list[CacheKey | None] = [None] * self.num_slots
    self._prefix_index: dict[CacheKey, set[int]] = {}  # slots by what they have cached
    self._block_index: dict[CacheKey, set[int]] = {}  # likewise, by its first blocks

  def _find_copy_source(
    self, key: CacheKey, vacant: set[int], target: int
  ) -> int | None:
    """Finds a slot in use that has cached `key`, in the partition of `target`.

    A slot in use is not overwritten by any prefill of the same dispatch.
    """
    return self._source_in(self._prefix_index.get(key, set()) - vacant, target)

  def _source_in(self, slots: set[int], target: int) -> int | None:
    """Returns the first of `slots` in the partition of `target`."""
    partition = self._partition(target)
    return min((s for s in slots if self._partition(s) == partition), default=None)

  def _least_recent(self, slots: set[int]) -> int:
    return min(slots, key=lambda slot: (self._last_used[slot], slot))

  def _choose_slot(self, key: CacheKey, vacant: set[int]) -> int:
    """Chooses a vacant slot that has cached `key`, or else the least recently used."""
    candidates = self._prefix_index.get(key, set()) & vacant
    if not candidates and self._num_partitions > 1:
      partition = self._choose_partition(key, vacant)
      candidates = {slot for slot in vacant if self._partition(slot) == partition}
    return self._least_recent(candidates or vacant)

  def _choose_partition(self, key: CacheKey, vacant: set[int]) -> int:
    """Chooses the partition with the most vacant slots.

    One where `key` is cached may have fewer of them, by half a partition: groups up to
    that size stay together, and the partitions are about equally busy.
    """
    num_vacant = collections.Counter(self._partition(slot) for slot in vacant)
    holding = {self._partition(slot) for slot in self._prefix_index.get(key, ())}
    for partition in holding & num_vacant.keys():
      num_vacant[partition] += self._partition_size // 2
    return min(num_vacant, key=lambda partition: (-num_vacant[partition], partition))

  def _partition(self, slot: int) -> int:
    return slot // self._partition_size

  def is_vacant(self, slot: int) -> bool:
    """Returns whether no request is in a slot."""
    return self._owners[slot] is None

  def forget_prompt(self, slot: int) -> None:
    """Forgets which prompt a slot has cached, so that it is computed again."""
    old_key = self._cached[slot]
    for index, old in self._entries(old_key) if old_key is not None else ():
      index[old].discard(slot)
      if not index[old]:
        del index[old]
    self._cached[slot] = None

  def _set_cached(self, slot: int, key: CacheKey) -> None:
    """Records that `slot` now has the keys and values of `key`."""
    self.forget_prompt(slot)
    self._cached[slot] = key
    for index, new in self._entries(key):
      index.setdefault(new, set()).add(slot)

  def _entries(self, key: CacheKey) -> list[tuple[dict[CacheKey, set[int]], CacheKey]]:
    """Returns the indexes that list a slot with `key` cached, and under which keys."""
    blocks = [(self._block_index, part) for part in self._block_keys(key)]
    return [(self._prefix_index, key), *blocks]


def _in_stages(staged: dict[int, Any]) -> list[list[Any]]:
  """Orders staged prompts by slot so that each follows the one it copies from."""
  stages: list[list[Any]] = []
  stage_of: dict[int | None, int] = {}
  for slot, one in staged.items():
    stage_of[slot] = stage_of[one.source] + 1 if one.source in stage_of else 0
    if stage_of[slot] == len(stages):
      stages.append([])
    stages[stage_of[slot]].append(one)
  return stages
