"""GroupQueue: leases episodes to environments, gives whole groups to the trainer.

Groups are numbered 0, 1, 2 … in the order they are admitted. With G env groups the
number i is played by env group `i % G` as its episode `i − i % G`, so each env group
sees episode ids 0, G, 2G … and `base_seed + group_id + episode_id = base_seed + i`
is unique. Everything is decided by numbers, nothing by who comes first.
"""

import asyncio
import contextlib
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl.rollout.group import GroupState, Rows
from jaxrl.types import Group

Filter = Callable[[int, int, Group], bool]


class Lease(NamedTuple):
  """The right to play one attempt: `member` of the group's task, once.

  start_step: the trainer's step when the group was admitted. attempt: 0, or how
  often this member has failed before; the seed is the same at every attempt.
  """

  group_id: int
  episode_id: int
  member: int
  start_step: int
  attempt: int


class GroupQueue:
  """One tag's queue. Lives on one event loop; see the module for its numbering.

  num_groups: groups a step; −1 = until the data is traversed. group_size: members a
  group needs. num_env_groups: G, env groups that play at once. async_ratio: how far
  ahead of the trainer, in steps, rollouts may run; fractions too. redundancy: extra
  members started, of which the slowest are given up. retries: how often a failed
  member is played again. min_members: a group with fewer sound members is dropped
  and replaced; None = all of them. keep_failed: failed members stay in the group
  (validation scores them 0). lease_timeout: seconds an episode may take. total: how
  many groups there are in all, for games without a data set. in_order: groups are
  taken by number; else the first that are ready. max_lost: so many groups in a row
  dropped or filtered, and none kept, is an error. group_filter: True drops a group.
  """

  def __init__(
    self,
    group_filter: Filter | None = None,
    clock: Callable[[], float] = time.monotonic,
    *,
    num_groups: int = 8,
    group_size: int = 1,
    num_env_groups: int = 8,
    async_ratio: float = 0.0,
    redundancy: int = 0,
    retries: int = 1,
    min_members: int | None = None,
    keep_failed: bool = False,
    lease_timeout: float | None = None,
    total: int | None = None,
    in_order: bool = True,
    max_lost: int = 256,
  ):
    if num_groups == 0 or num_groups < -1:
      raise ValueError(f'num_groups must be positive or -1, not {num_groups}')
    if min(group_size, num_env_groups) < 1 or min(redundancy, retries) < 0:
      raise ValueError('group_size and num_env_groups start at 1, others at 0')
    if async_ratio < 0:
      raise ValueError(f'async_ratio must be at least 0, not {async_ratio}')
    self.num_groups, self.group_size = num_groups, group_size
    self.num_env_groups, self.async_ratio = num_env_groups, async_ratio
    self._members = group_size + redundancy
    self._retries, self._keep_failed = retries, keep_failed
    self._min_members = group_size if min_members is None else min_members
    self._lease_timeout, self._total, self._in_order = lease_timeout, total, in_order
    self._max_lost, self._filter, self._clock = max_lost, group_filter, clock
    self.step = 0
    self.counts: Counter[str] = Counter()
    self._next = 0  # the number of the next group when num_groups > 0
    self._next_of = {g: g for g in range(num_env_groups)}  # per env group, for −1
    self._open: dict[int, GroupState] = {}
    self._ready: dict[int, Group] = {}
    self._held: dict[tuple[int, int], int] = {}  # (group_id, env_id) → group number
    self._waiting: dict[int, list[asyncio.Future]] = defaultdict(list)
    self._changed = asyncio.Event()
    self._exhausted = self._closed = False
    self._lost = 0
    self._error: Exception | None = None

  # ---- for environments

  async def get_episode_id(self, group_id: int, env_id: int) -> Lease | None:
    """Leases the next attempt of this env group; None when there is no more.

    An environment holds one lease: asking again gives the last one up as failed.
    """
    if not 0 <= group_id < self.num_env_groups:
      raise ValueError(f'group_id {group_id} is not one of {self.num_env_groups}')
    number = self._held.get((group_id, env_id))
    if number is not None:
      self._lose_lease(number, (group_id, env_id), 'abandoned')
    while not self._closed:
      self._admit_endless(group_id)
      for number in sorted(n for n in self._open if self._group_of(n) == group_id):
        group = self._open[number]
        member = group.free_member()
        if member is not None:
          deadline = self._clock() + (self._lease_timeout or math.inf)
          group.leases[env_id] = (member, deadline)
          self._held[group_id, env_id] = number
          self.counts['leased'] += 1
          return Lease(
            group_id,
            number - group_id,
            member,
            group.start_step,
            group.attempts[member],
          )
      if self._exhausted and not any(self._group_of(n) == group_id for n in self._open):
        return None
      future = asyncio.get_running_loop().create_future()
      self._waiting[group_id].append(future)
      await future
    return None

  async def put(
    self,
    group_id: int,
    episode_id: int,
    start_step: int,
    rollout: Rows | None,
    env_id: int,
  ) -> bool:
    """Returns a played attempt, or None when the data set had no more.

    False when the lease is unknown or expired: the rollout is counted and ignored.
    """
    number = group_id + episode_id
    group = self._open.get(number)
    if (
      group is None
      or self._held.get((group_id, env_id)) != number
      or group.start_step != start_step
    ):
      self.counts['ignored'] += 1
      return False
    del self._held[group_id, env_id]
    member, _ = group.leases.pop(env_id)
    if rollout is None:
      group.ended.add(member)
      self._exhausted = True
    elif any(row.failed for row in rollout):
      self._fail(group, member, rollout)
    else:
      group.played[member] = rollout
      self.counts['played'] += 1
    self._settle(group)
    return True

  # ---- for the trainer

  async def advance_step(self, step: int) -> None:
    """The trainer now collects `step`: old groups expire, new ones are admitted."""
    self.step = step
    if self.num_groups < 0:
      return
    oldest = step - math.ceil(self.async_ratio)
    for group in list(self._open.values()):
      if group.start_step < oldest:
        self._close(group)
        self.counts['expired'] += 1
    for number, rows in list(self._ready.items()):
      if rows[0].extras.get('start_step', step) < oldest:
        del self._ready[number]
        self.counts['expired'] += 1
    while len(self._open) + len(self._ready) < self.capacity and self._admit():
      pass

  @property
  def capacity(self) -> int:
    """Groups that may be admitted and not yet taken: ⌈(1 + async_ratio) · groups⌉."""
    return math.ceil(round((1 + self.async_ratio) * self.num_groups, 6))

  async def get_batch(
    self, batch_size: int | None = None, current_step: int | None = None
  ) -> list[Group]:
    """Waits for `batch_size` whole groups and takes them, in the order of numbers.

    None takes num_groups, −1 all there are, once the data is traversed. Fewer come
    only when the data is traversed or the queue shut down. Raises RuntimeError when
    so many groups were lost in a row that it would go on for ever.
    """
    size = self.num_groups if batch_size is None else batch_size
    if self.num_groups > 0 and size > self.capacity:
      raise ValueError(
        f'{size} groups are asked for, but only {self.capacity} are ever admitted'
      )
    if current_step is not None and current_step != self.step:
      await self.advance_step(current_step)
    while True:
      self._changed.clear()
      self.expire_leases()
      if self._error is not None:
        raise self._error
      numbers = self._takeable(size)
      if numbers is not None:
        self.counts['taken'] += len(numbers)
        return [self._ready.pop(number) for number in numbers]
      await self._wait()

  def _takeable(self, size: int) -> list[int] | None:
    ready = sorted(self._ready)
    if self._closed or (self._exhausted and not self._open):
      return ready if size < 0 else ready[:size]
    if size < 0:
      return None
    first = sorted([*self._open, *self._ready])[:size] if self._in_order else ready
    if len(first) < size or any(number in self._open for number in first[:size]):
      return None
    return first[:size]

  async def _wait(self) -> None:
    """Until something changes; at most until the next deadline is checked."""
    limit = None if self._lease_timeout is None else min(1.0, self._lease_timeout)
    with contextlib.suppress(TimeoutError):
      await asyncio.wait_for(self._changed.wait(), limit)

  def expire_leases(self) -> int:
    """Fails every lease past its deadline; returns how many there were."""
    now, count = self._clock(), 0
    if self._lease_timeout is None:
      return 0
    for number, group in list(self._open.items()):
      late = [env for env, (_, deadline) in group.leases.items() if deadline <= now]
      for env_id in late:
        if number in self._open:
          self._lose_lease(number, (self._group_of(number), env_id), 'timed_out')
          count += 1
    return count

  async def shutdown(self) -> None:
    """No more leases; whoever waits is let go."""
    self._closed = True
    self._wake(range(self.num_env_groups))

  def metrics(self) -> dict[str, float]:
    """Counts since the start: leased, played, retried, failed, filtered, …"""
    return {f'queue/{name}': float(count) for name, count in self.counts.items()}

  def state_dict(self) -> dict[str, Any]:
    """As JSON. Groups not yet taken are remembered by number, and played again."""
    pending = sorted([*self._open, *self._ready])
    return {
      'next': self._next,
      'next_of': [self._next_of[g] for g in range(self.num_env_groups)],
      'pending': pending,
      'step': self.step,
    }

  def load_state_dict(self, state: Mapping[str, Any]) -> None:
    """Raises ValueError if the number of env groups changed under an endless queue."""
    self.step, self._next = state['step'], state['next']
    if self.num_groups < 0:
      if len(state['next_of']) != self.num_env_groups:
        raise ValueError('num_env_groups differs from that of the checkpoint')
      self._next_of = dict(enumerate(state['next_of']))
    self._open.clear()
    self._ready.clear()
    self._held.clear()
    for number in state['pending']:
      self._add(number)

  # ---- inside

  def _group_of(self, number: int) -> int:
    return number % self.num_env_groups

  def _add(self, number: int) -> None:
    self._open[number] = GroupState(number, self.step, self._members)
    self._wake([self._group_of(number)])

  def _admit(self) -> bool:
    """Admits the next group in number; False when there is none."""
    if self._exhausted or (self._total is not None and self._next >= self._total):
      self._exhausted = True
      return False
    self._add(self._next)
    self._next += 1
    return True

  def _admit_endless(self, group_id: int) -> None:
    """For num_groups −1: an env group's next episode is admitted when it asks."""
    if self.num_groups > 0 or self._exhausted:
      return
    mine = (g for n, g in self._open.items() if self._group_of(n) == group_id)
    if any(group.free_member() is not None for group in mine):
      return
    number = self._next_of[group_id]
    if self._total is not None and number >= self._total:
      self._exhausted = all(n >= self._total for n in self._next_of.values())
      return
    self._next_of[group_id] += self.num_env_groups
    self._add(number)

  def _lose_lease(self, number: int, key: tuple[int, int], why: str) -> None:
    group = self._open[number]
    del self._held[key]
    member, _ = group.leases.pop(key[1])
    self.counts[why] += 1
    self._fail(group, member, group.missing(member, key[0], why))
    self._settle(group)

  def _fail(self, group: GroupState, member: int, rows: Rows) -> None:
    group.attempts[member] += 1
    if group.attempts[member] <= self._retries:
      self.counts['retried'] += 1
    else:
      group.failed[member] = rows
      self.counts['failed'] += 1

  def _settle(self, group: GroupState) -> None:
    """Closes the group if it is full or can get no fuller; wakes who may go on."""
    sound = len(group.played)
    if sound < self.group_size and not group.accounted:
      self._wake([self._group_of(group.number)])
      return
    self._close(group)
    if not sound and not group.failed:
      self._changed.set()  # the data ended before this group began
      return
    rows = group.rows(self.group_size, self._keep_failed)
    if sound < self._min_members and not (self._keep_failed and group.failed):
      self._drop('dropped', group.reasons())
      return
    if self._filtered(group.number, rows):
      self._drop('filtered', 'the group filter dropped them')
      return
    self._lost = 0
    for row in rows:
      row.extras['start_step'] = group.start_step
    self._ready[group.number] = rows
    self._changed.set()

  def _filtered(self, number: int, rows: Group) -> bool:
    if self._filter is None:
      return False
    group_id = self._group_of(number)
    try:
      return bool(self._filter(group_id, number - group_id, rows))
    except Exception as error:
      self._error = error
      self._changed.set()
      return False

  def _drop(self, why: str, reason: str) -> None:
    """Counts a lost group and admits another in its place."""
    self.counts[why] += 1
    self._lost += 1
    if self._lost >= self._max_lost:
      self._error = RuntimeError(
        f'{self._lost} groups in a row were lost and none was kept; the last '
        f'because: {reason}'
      )
    elif self.num_groups > 0:
      self._admit()
    self._changed.set()

  def _close(self, group: GroupState) -> None:
    del self._open[group.number]
    group_id = self._group_of(group.number)
    for env_id in group.leases:
      self._held.pop((group_id, env_id), None)
      self.counts['surplus'] += 1
    self._wake([group_id])

  def _wake(self, group_ids: Sequence[int] | range) -> None:
    """Wakes all who wait for these env groups, and the trainer."""
    for group_id in group_ids:
      for future in self._waiting.pop(group_id, []):
        if not future.done():
          future.set_result(None)
    self._changed.set()
