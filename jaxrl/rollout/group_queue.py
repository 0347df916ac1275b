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
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxrl.data.curricula import Result
from jaxrl.rollout.gate import Filter, Gate, Shaper
from jaxrl.rollout.group import GroupState, Lease, Numbers
from jaxrl.rollout.lost import Drop, Lost
from jaxrl.rollout.members import Rows
from jaxrl.rollout.news import Item, News
from jaxrl.rollout.shelf import Results, Shelf
from jaxrl.types import Group


class GroupQueue:
  """One tag's queue. Lives on one event loop; see the module for its numbering.

  num_groups: groups a step; −1 = until the data is traversed. group_size: members a
  group needs. num_env_groups: G, env groups that play at once. async_ratio: how far
  ahead of the trainer, in steps, rollouts may run; fractions too. redundancy: extra
  members started, of which the slowest are given up. retries: how often a failed member
  is played again, besides where workers are lost. min_members: a group with fewer sound
  members is dropped and replaced; 0 = all are needed. keep_failed: failed members stay
  in the group. lease_timeout: seconds an episode may take, 0 = any. total: how many
  groups there are in all, for games without a data set; 0 = endless. in_order: groups
  are taken by number; else the first that are ready. max_lost: so many groups dropped
  or filtered in a row, and none kept, is an error. greedy: each group has one member
  more, played at temperature 0, without which it is not whole. group_filter: True, or a
  `Drop` that says why, drops a group. shaper: changes the rewards and weights of groups
  that are kept. expires: groups admitted more than ⌈async_ratio⌉ steps ago are given
  up; else none is, whatever its age, and `get_batch` is told which tokens are too old.
  """

  def __init__(
    self,
    group_filter: Filter | None = None,
    shaper: Shaper | None = None,
    clock: Callable[[], float] = time.monotonic,
    *,
    num_groups: int = 8,
    group_size: int = 1,
    num_env_groups: int = 8,
    async_ratio: float = 0.0,
    redundancy: int = 0,
    retries: int = 1,
    min_members: int = 0,
    keep_failed: bool = False,
    lease_timeout: float = 0.0,
    total: int = 0,
    in_order: bool = True,
    max_lost: int = 256,
    greedy: bool = False,
    expires: bool = True,
  ):
    if num_groups == 0 or num_groups < -1:
      raise ValueError(f'num_groups must be positive or -1, not {num_groups}')
    if min(group_size, num_env_groups) < 1:
      raise ValueError('group_size and num_env_groups must be at least 1')
    if min(redundancy, retries, async_ratio, lease_timeout, total) < 0:
      raise ValueError('redundancy, retries, async_ratio … must not be negative')
    if not 0 <= min_members <= group_size:
      raise ValueError(f'min_members must lie within [0, {group_size}]')
    if greedy and keep_failed:
      raise ValueError('keep_failed would make a failed greedy member the baseline')
    self.num_groups, self.group_size = num_groups, group_size
    self.num_env_groups, self.async_ratio = num_env_groups, async_ratio
    self._members, self._retries = group_size + redundancy, retries
    self._min_members, self._keep_failed = min_members or group_size, keep_failed
    self._lease_timeout, self._in_order = lease_timeout or math.inf, in_order
    self._expires, self._clock, self._greedy = expires, clock, greedy
    least = self._min_members
    self._gate = Gate(group_filter, shaper, least=least, greedy=greedy)
    self.step = 0
    self.counts: Counter[str] = Counter()
    self._numbers = Numbers(num_env_groups, total or None, endless=num_groups < 0)
    self._open: dict[int, GroupState] = {}
    self._ready, self._results = Shelf(), Results()
    self._held: dict[tuple[int, int], int] = {}  # (group_id, env_id) → number
    self._asked: dict[tuple[int, int], object] = {}
    self._waiting: dict[int, list[asyncio.Future]] = defaultdict(list)
    self._changed, self._news = asyncio.Event(), News()
    self._closed, self._lost = False, Lost(max_lost)
    self._error: Exception | None = None

  # ---- for environments

  async def get_episode_id(self, group_id: int, env_id: int) -> Lease | None:
    """Leases the next attempt of this env group; None when there is no more.

    An environment holds one lease: asking again gives the last one up as failed.
    """
    if not 0 <= group_id < self.num_env_groups:
      raise ValueError(f'group_id {group_id} is not below {self.num_env_groups}')
    if (group_id, env_id) in self._held:
      self._lose_lease(group_id, env_id, 'abandoned')
    mine = self._asked[group_id, env_id] = object()  # who asked before may be gone
    while not self._closed and self._asked[group_id, env_id] is mine:
      lease = self._lease(group_id, env_id)
      if lease is not None:
        return lease
      if self._numbers.over(group_id) and not self._open_of(group_id):
        self._changed.set()
        return None
      future = asyncio.get_running_loop().create_future()
      self._waiting[group_id].append(future)
      await future
    return None

  def _lease(self, group_id: int, env_id: int) -> Lease | None:
    groups = self._open_of(group_id)
    if self.num_groups < 0 and all(g.free_member() is None for g in groups):
      number = self._numbers.take(group_id)
      groups += [] if number is None else [self._add(number)]
    for group in groups:
      member = group.free_member()
      if member is not None:
        lease = group.lease(member, group_id)
        group.leases[env_id] = (member, self._clock() + self._lease_timeout)
        self._held[group_id, env_id] = group.number
        self.counts['leased'] += 1
        return lease
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
    held = self._held.get((group_id, env_id)) == number
    member = group.leases[env_id][0] if group is not None and held else -1
    own = all(row.member == member for row in rollout or ())  # not of who was there
    if group is None or not held or not own or group.start_step != start_step:
      self.counts['ignored'] += 1
      return False
    del self._held[group_id, env_id], group.leases[env_id]
    if rollout is None:
      self.counts['ended'] += 1
      group.ended.add(member)
      self._numbers.cut(number)
      self._wake(range(self.num_env_groups))
    elif any(row.failed for row in rollout):
      self._fail(group, member, rollout)
    else:
      group.add(member, rollout)
      self.counts['played'] += 1
    self._settle(group)
    return True

  async def wait_given_up(self, after: int) -> tuple[int, list[Item]]:
    """Waits for leases given up since `after`, which starts at 0.

    Returns the next `after`, and (group_id, env_id, lease) of each, so that whoever
    plays them may stop. Never returns once the queue is shut down.
    """
    return await self._news.wait(after)

  # ---- for the trainer

  @property
  def capacity(self) -> int:
    """Groups that may be admitted and not yet taken: ⌈(1 + async_ratio) · groups⌉."""
    return math.ceil(round((1 + self.async_ratio) * self.num_groups, 6))

  async def advance_step(self, step: int) -> None:
    """The trainer now collects `step`: old groups expire, new ones are admitted."""
    self.step = step
    if self.num_groups < 0:
      return
    oldest = step - math.ceil(self.async_ratio)
    late = [g for g in self._open.values() if self._expires and g.start_step < oldest]
    for group in late:
      self._close(group)
    gone = self._ready.expire(oldest) if self._expires else 0
    self.counts['expired'] += len(late) + gone
    while len(self._open) + len(self._ready) < self.capacity and self._admit():
      pass
    self._changed.set()

  async def get_batch(
    self,
    batch_size: int | None = None,
    current_step: int | None = None,
    min_version: int | None = None,
  ) -> list[Group]:
    """Waits for `batch_size` whole groups and takes them, in the order of numbers.

    None takes num_groups, −1 all there are, once the data is traversed. Fewer come
    only when the data is traversed or the queue shut down. min_version: groups with a
    token of older weights are lost, and replaced. Raises RuntimeError when so many
    groups were lost in a row that it would go on for ever.
    """
    size = self.num_groups if batch_size is None else batch_size
    if self.num_groups > 0 and size > self.capacity:
      raise ValueError(
        f'{size} groups are asked for, but only {self.capacity} are ever admitted'
      )
    idle = not self._open and not self._ready  # as before the first step
    if current_step is not None and (idle or current_step != self.step):
      await self.advance_step(current_step)
    while True:
      self._changed.clear()
      self.expire_leases()
      if min_version is not None:
        self._lose_stale(min_version)
      if self._error is not None:
        raise self._error
      numbers = self._takeable(size)
      if numbers is not None:
        self.counts['taken'] += len(numbers)
        self._lost.taken()
        groups = [self._ready.take(number) for number in numbers]
        for group in groups:
          self._results.note(group)
        return groups
      limit = min(1.0, self._lease_timeout)  # then deadlines are looked at again
      with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(self._changed.wait(), limit)

  def _takeable(self, size: int) -> list[int] | None:
    ready = sorted(self._ready)
    if self._closed or (self._numbers.all_over and not self._open):
      return ready if size < 0 else ready[:size]
    if size < 0:
      return None
    first = sorted([*self._open, *self._ready])[:size] if self._in_order else ready
    if len(first) < size or any(number in self._open for number in first[:size]):
      return None
    return first[:size]

  def expire_leases(self) -> int:
    """Fails every lease past its deadline; returns how many there were."""
    now, late = self._clock(), []
    for (group_id, env_id), number in self._held.items():  # the oldest comes first
      if self._open[number].leases[env_id][1] > now:
        break
      late.append((group_id, env_id))
    for group_id, env_id in late:
      if (group_id, env_id) in self._held:  # else its group was closed with one before
        self._lose_lease(group_id, env_id, 'timed_out')
    return len(late)

  def results(self) -> list[Result]:
    """How groups fared that were taken or filtered since the last call, by seed."""
    return self._results.take()

  async def shutdown(self) -> None:
    """No more leases; whoever waits is let go."""
    self._closed = True
    self._wake(range(self.num_env_groups))

  def metrics(self) -> dict[str, float]:
    """Counts since the start: leased, played, retried, failed, filtered, …"""
    return {f'queue/{name}': float(count) for name, count in self.counts.items()}

  def state_dict(self) -> dict[str, Any]:
    """As JSON. Groups not yet taken are remembered by number, and played again."""
    return {
      'step': self.step,
      'pending': sorted([*self._open, *self._ready]),
      'numbers': self._numbers.state(),
      'results': self._results.kept,
    }

  def load_state_dict(self, state: Mapping[str, Any]) -> None:
    """Raises ValueError if the number of env groups changed under an endless queue."""
    self._numbers.load(state['numbers'])
    self.step = state['step']
    self._results.kept = [(int(s), float(a), int(n)) for s, a, n in state['results']]
    for group in list(self._open.values()):
      self._close(group)
    self._ready.clear()
    for number in state['pending']:
      self._add(number)

  # ---- inside

  def _open_of(self, group_id: int) -> list[GroupState]:
    """The open groups of an env group, in order of numbers."""
    numbers = (n for n in self._open if n % self.num_env_groups == group_id)
    return [self._open[number] for number in sorted(numbers)]

  def _add(self, number: int) -> GroupState:
    own = number, self.step, self._members, self._greedy
    group = self._open[number] = GroupState(*own)
    self._wake([number % self.num_env_groups])
    return group

  def _admit(self) -> bool:
    """Admits the next group in number; False when there is none."""
    number = self._numbers.take()
    if number is not None:
      self._add(number)
    return number is not None

  def _lose_lease(self, group_id: int, env_id: int, why: str) -> None:
    group = self._open[self._held.pop((group_id, env_id))]
    member, _ = group.leases.pop(env_id)
    self.counts[why] += 1
    group.abandoned[member] += why == 'abandoned'
    self._news.tell((group_id, env_id, group.lease(member, group_id)))
    self._fail(group, member, group.missing(member, group_id, why))
    self._settle(group)

  def _fail(self, group: GroupState, member: int, rows: Rows) -> None:
    again = group.again(member, self._retries)
    self.counts['retried' if again else 'failed'] += 1
    self.counts[f'stopped/{rows[-1].stop_reason}'] += 1
    if not again:
      group.failed[member] = rows

  def _settle(self, group: GroupState) -> None:
    """Closes the group if it is full or can get no fuller; wakes who may go on."""
    full = group.sound >= self.group_size and group.has_baseline
    if not full and not group.accounted:
      self._wake([group.number % self.num_env_groups])
      return
    self._close(group)
    if not group.played and not group.failed:
      self.counts['unplayed'] += 1  # the data ended before this group began
      return
    rows = group.rows(self.group_size, self._keep_failed)
    short = group.sound < self._min_members or not group.has_baseline
    if short and not (self._keep_failed and group.failed):
      self._lose_group('dropped', Drop('dropped', group.reasons()))
      return
    group_id = group.number % self.num_env_groups
    try:
      rows, drop = self._gate.judge(group_id, group.number - group_id, rows)
    except Exception as error:  # the user's code: it ends the run, not an environment
      self._error = error
      self._changed.set()
      return
    if drop is not None:
      self._results.note(rows)
      self.counts[f'filtered/{drop.name}'] += 1
      self._lose_group('filtered', drop)
      return
    self._lost.keep()
    self.counts['whole'] += 1
    self._ready.put(group.number, group.start_step, rows)
    self._changed.set()

  def _lose_stale(self, min_version: int) -> None:
    """Loses groups, whole or in play, with a token that older weights wrote."""
    found = self._ready.older(min_version)
    for number in found:
      del self._ready[number]
    for group in list(self._open.values()):
      if group.oldest is not None and group.oldest < min_version:
        found[group.number] = group.oldest
        self._close(group)
    for oldest in found.values():
      why = f'written by the weights of step {oldest}, wanted {min_version}'
      self._lose_group('stale', Drop('stale', why))

  def _lose_group(self, counted: str, drop: Drop) -> None:
    """Counts a lost group and admits another in its place."""
    self.counts[counted] += 1
    self._error = self._error or self._lost.lose(drop)
    if self._error is None and self.num_groups > 0:
      self._admit()
    self._changed.set()

  def _close(self, group: GroupState) -> None:
    del self._open[group.number]
    group_id = group.number % self.num_env_groups
    for env_id, (member, _) in group.leases.items():
      del self._held[group_id, env_id]
      self.counts['surplus'] += 1
      self._news.tell((group_id, env_id, group.lease(member, group_id)))
    self._wake([group_id])

  def _wake(self, group_ids: Iterable[int]) -> None:
    """Wakes all who wait for these env groups, and the trainer."""
    for group_id in group_ids:
      for future in self._waiting.pop(group_id, []):
        if not future.done():
          future.set_result(None)
    self._changed.set()
