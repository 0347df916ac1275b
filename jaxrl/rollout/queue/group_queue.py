"""GroupQueue leases episodes to environments and hands finished groups to the trainer.

Groups are numbered 0, 1, 2 … in the order they are admitted. With G env groups, group
number `i` is played by env group `i % G` as its episode `i − i % G`. Each env group
therefore sees the episode ids 0, G, 2G …, and the episode seed
`base_seed + group_id + episode_id = base_seed + i` is unique. Decisions depend on these
numbers and never on which environment arrives first.

The life of a group: `advance_step` admits it, `get_episode_id` leases its samples,
`put` takes the played rows, `GroupPipeline` filters and shapes the finished group, and
`get_batch` hands it to the trainer.
"""

import asyncio
import contextlib
import dataclasses
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from jaxrl.group_stats import GroupResult, SampleRows
from jaxrl.options import Options, option
from jaxrl.rollout.queue.group_allocation import GroupIdAllocator
from jaxrl.rollout.queue.group_pipeline import (
  DropReason,
  DropTracker,
  GroupFilterFn,
  GroupPipeline,
  RewardShaperFn,
)
from jaxrl.rollout.queue.group_state import (
  Cancellation,
  CancellationLog,
  EpisodeLease,
  FailureLog,
  GroupResults,
  GroupState,
  ReadyGroups,
)
from jaxrl.types import Group, StateDict


@dataclasses.dataclass(frozen=True)
class QueueOptions(Options):
  """How a queue admits, retries and drops the groups of one environment tag."""

  async_ratio: float = option(
    0.0,
    'How many steps rollouts may run ahead of the trainer; may be a fraction, and 0 is '
    'synchronous.',
    low=0,
  )
  max_retries: int = option(
    1,
    'How often a failed sample is retried; attempts whose worker was lost are not '
    'counted at first.',
    low=0,
  )
  min_group_size: int = option(
    0,
    'A group with fewer valid samples is dropped and replaced; 0 requires all samples.',
  )
  extra_samples: int = option(
    0,
    'Extra samples started per group, of which the slowest are cancelled.',
    low=0,
  )
  episode_timeout: float = option(
    0.0, 'Seconds an episode may take; 0 for no limit.', low=0
  )
  max_consecutive_drops: int = option(
    256, 'How many groups may be dropped in a row before it is an error.', low=1
  )


class GroupQueue:
  """Queues the groups of one environment tag between env workers and the trainer.

  A queue lives on one event loop, as a plain object or inside a Ray actor.

  Attributes:
    num_groups: Groups per step, or −1 for an endless queue.
    group_size: Samples that a finished group has.
    num_env_groups: Env groups that play at the same time.
    async_ratio: How many steps rollouts may run ahead of the trainer.
    step: The step that the trainer is collecting.
    counts: Events since the run began, by name; see `metrics`.
  """

  def __init__(
    self,
    group_filter: GroupFilterFn | None = None,
    shaper: RewardShaperFn | None = None,
    clock: Callable[[], float] = time.monotonic,
    *,
    options: QueueOptions = QueueOptions(),
    num_groups: int = 8,
    group_size: int = 1,
    num_env_groups: int = 8,
    keep_failed: bool = False,
    total: int = 0,
    in_order: bool = True,
    greedy: bool = False,
    expires: bool = True,
    failures: FailureLog | None = None,
  ):
    """Creates an empty queue.

    Args:
      group_filter: Decides which finished groups are dropped.
      shaper: Changes the rewards and weights of groups that are kept.
      clock: Returns the time in seconds, for lease deadlines.
      options: How it admits, retries and drops groups.
      num_groups: Groups per step. With −1 the queue is endless: it plays until the
        data is exhausted.
      group_size: Samples per group.
      num_env_groups: Env groups that play at the same time.
      keep_failed: Whether failed samples stay in the group.
      total: Number of groups there are in all, for games without a data set; 0 for no
        limit.
      in_order: Whether groups are taken by number. Otherwise the first finished groups
        are taken.
      greedy: Whether each group needs one more sample, played at temperature 0.
      expires: Whether groups admitted more than ⌈async_ratio⌉ steps ago are cancelled.
        Otherwise groups of any age are kept, and `get_batch` drops those with tokens
        of weights older than `min_version`.
      failures: Logs why episodes fail; None for a log of the queue's own.

    Raises:
      ValueError: If an option is out of range.
    """
    self._failures = FailureLog() if failures is None else failures
    _validate_sizes(num_groups, group_size, num_env_groups, options.min_group_size)
    if total < 0:
      raise ValueError(f'total={total} must not be negative')
    if greedy and keep_failed:
      raise ValueError(
        'keep_failed and greedy exclude each other: a failed greedy sample '
        'would become the baseline'
      )
    self.num_groups = num_groups
    self.group_size = group_size
    self.num_env_groups = num_env_groups
    self.async_ratio = options.async_ratio
    self._num_started = group_size + options.extra_samples
    self._max_retries = options.max_retries
    self._min_valid = options.min_group_size or group_size
    self._keep_failed = keep_failed
    self._episode_timeout = options.episode_timeout or math.inf
    self._in_order = in_order
    self._greedy = greedy
    self._expires = expires
    self._clock = clock
    self._pipeline = GroupPipeline(
      group_filter, shaper, min_samples=self._min_valid, needs_greedy=greedy
    )
    self._drops = DropTracker(options.max_consecutive_drops)
    self._numbers = GroupIdAllocator(
      num_env_groups, total or None, endless=num_groups < 0
    )
    self.step = 0
    self.counts: Counter[str] = Counter()
    self._active: dict[int, GroupState] = {}  # groups in play, by number
    # The same by env group, since every lease asks for those of one.
    self._active_of: dict[int, dict[int, GroupState]] = defaultdict(dict)
    self._ready = ReadyGroups()
    self._results = GroupResults()
    self._leases: dict[tuple[int, int], int] = {}  # (group_id, env_id) → group number
    self._pending: dict[tuple[int, int], object] = {}  # the latest request of each env
    self._waiters: dict[int, list[asyncio.Future[None]]] = defaultdict(list)  # by group
    self._changed = asyncio.Event()  # something that `get_batch` waits for
    self._cancellations = CancellationLog()
    self._closed = False
    self._error: Exception | None = None

  # ---- called by environment workers

  async def get_episode_id(self, group_id: int, env_id: int) -> EpisodeLease | None:
    """Leases the next sample of an env group and waits until there is one.

    An environment holds one lease at a time. Asking again gives its last lease up as a
    failed attempt.

    Args:
      group_id: The env group.
      env_id: The environment within the env group.

    Returns:
      The lease, or None when there is nothing more to play.

    Raises:
      ValueError: If there is no such env group.
    """
    if not 0 <= group_id < self.num_env_groups:
      raise ValueError(
        f'group_id {group_id} is out of range: there are {self.num_env_groups} env '
        'groups'
      )
    if (group_id, env_id) in self._leases:
      self._cancel_lease(group_id, env_id, 'abandoned')
    # A later request of the same environment replaces this one, whose caller is gone.
    request = self._pending[group_id, env_id] = object()
    while not self._closed and self._pending[group_id, env_id] is request:
      lease = self._try_lease(group_id, env_id)
      if lease is not None:
        return lease
      if self._numbers.exhausted(group_id) and not self._active_groups(group_id):
        self._changed.set()
        return None
      future = asyncio.get_running_loop().create_future()
      self._waiters[group_id].append(future)
      await future
    return None

  def _try_lease(self, group_id: int, env_id: int) -> EpisodeLease | None:
    """Leases the first unplayed sample of the env group's groups, if there is one."""
    groups = self._active_groups(group_id)
    if self.num_groups < 0 and all(g.next_unplayed() is None for g in groups):
      number = self._numbers.allocate(group_id)
      if number is not None:
        groups.append(self._add_group(number))
    for group in groups:
      sample_index = group.next_unplayed()
      if sample_index is not None:
        deadline = self._clock() + self._episode_timeout
        group.leases[env_id] = (sample_index, deadline)
        self._leases[group_id, env_id] = group.number
        self.counts['leased'] += 1
        return group.make_lease(sample_index, group_id)
    return None

  async def put(
    self,
    group_id: int,
    episode_id: int,
    start_step: int,
    rollout: SampleRows | None,
    env_id: int,
  ) -> bool:
    """Takes the rows of a played sample and ends its lease.

    Args:
      group_id: The env group.
      episode_id: The episode that was leased.
      start_step: The step at which its group was admitted, from the lease.
      rollout: The sample's rows, or None if the data set had no more tasks.
      env_id: The environment within the env group.

    Returns:
      False if the lease is unknown or was taken back; the rows are then counted and
      ignored.
    """
    number = group_id + episode_id
    group = self._active.get(number)
    has_lease = self._leases.get((group_id, env_id)) == number
    if group is None or not has_lease or group.start_step != start_step:
      self.counts['ignored'] += 1
      return False
    sample_index, _ = group.leases[env_id]
    if any(row.sample_index != sample_index for row in rollout or ()):
      self.counts['ignored'] += 1  # played for an earlier lease of this environment
      return False
    del self._leases[group_id, env_id], group.leases[env_id]
    if rollout is None:
      self.counts['ended'] += 1
      group.out_of_data.add(sample_index)
      self._numbers.set_end(number)
      self._wake(range(self.num_env_groups))
    elif any(row.failed for row in rollout):
      self._record_failure(group, sample_index, rollout)
    else:
      group.add_played(sample_index, rollout)
      self.counts['played'] += 1
    self._finalize_if_done(group)
    return True

  def take_failures(self) -> list[tuple[str, str, str]]:
    """Returns the failures that were logged since the last call; see `FailureLog`."""
    return self._failures.take()

  async def wait_cancelled(self, after: int) -> tuple[int, list[Cancellation]]:
    """Waits for leases that the queue took back, so that workers can stop playing them.

    Never returns once the queue is shut down.

    Args:
      after: Where to continue reading; 0 at first.

    Returns:
      The value of `after` to pass next time, and (group_id, env_id, lease) of each
      lease that was taken back.
    """
    return await self._cancellations.wait(after)

  # ---- called by the trainer

  @property
  def capacity(self) -> int:
    """Returns the most groups admitted but not taken: ⌈(1 + async_ratio) · groups⌉."""
    return math.ceil(round((1 + self.async_ratio) * self.num_groups, 6))

  async def advance_step(self, step: int) -> None:
    """Begins collecting a step: expires old groups and admits new ones.

    Args:
      step: The step that the trainer now collects.
    """
    self.step = step
    if self.num_groups < 0:
      return
    oldest_step = step - math.ceil(self.async_ratio)
    self.counts['expired'] += self._expire_groups(oldest_step) if self._expires else 0
    while len(self._active) + len(self._ready) < self.capacity and self._admit_group():
      pass
    self._changed.set()

  def _expire_groups(self, oldest_step: int) -> int:
    """Discards the groups admitted before `oldest_step`; returns how many."""
    expired = [g for g in self._active.values() if g.start_step < oldest_step]
    for group in expired:
      self._close_group(group)
    return len(expired) + self._ready.expire(oldest_step)

  async def get_batch(
    self,
    batch_size: int | None = None,
    current_step: int | None = None,
    min_version: int | None = None,
  ) -> list[Group]:
    """Waits for finished groups and takes them, in the order of their numbers.

    Fewer groups are returned only when the data is exhausted or the queue shut down.

    Args:
      batch_size: Number of groups; None for `num_groups`, −1 for all there are once
        the data is exhausted.
      current_step: The step being collected; calls `advance_step` if it is new.
      min_version: Groups with a token of older weights are dropped and replaced.

    Returns:
      The groups.

    Raises:
      ValueError: If `batch_size` exceeds `capacity`.
      InsufficientGroupsError: If too many groups were dropped in a row.
    """
    size = self.num_groups if batch_size is None else batch_size
    if self.num_groups > 0 and size > self.capacity:
      raise ValueError(
        f'{size} groups are requested, but at most {self.capacity} are ever admitted'
      )
    is_empty = not self._active and not self._ready  # as before the first step
    if current_step is not None and (is_empty or current_step != self.step):
      await self.advance_step(current_step)
    while True:
      self._changed.clear()
      self.expire_leases()
      if min_version is not None:
        self._drop_stale(min_version)
      if self._error is not None:
        raise self._error
      numbers = self._takeable(size)
      if numbers is not None:
        return self._take_groups(numbers)
      timeout = min(1.0, self._episode_timeout)  # then check the deadlines again
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout):
          await self._changed.wait()

  def _takeable(self, size: int) -> list[int] | None:
    """Returns the numbers of the groups to hand out, or None to wait for more."""
    ready = sorted(self._ready)
    if self._closed or (self._numbers.all_exhausted and not self._active):
      return ready if size < 0 else ready[:size]
    if size < 0:
      return None
    candidates = sorted([*self._active, *self._ready]) if self._in_order else ready
    first = candidates[:size]
    if len(first) < size or any(number in self._active for number in first):
      return None
    return first

  def _take_groups(self, numbers: list[int]) -> list[Group]:
    self.counts['taken'] += len(numbers)
    self._drops.reset()
    groups = [self._ready.take(number) for number in numbers]
    for group in groups:
      self._results.record(group)
    return groups

  def expire_leases(self) -> int:
    """Fails every lease past its deadline.

    Returns:
      The number of leases that were past their deadline.
    """
    now = self._clock()
    overdue: list[tuple[int, int]] = []
    for (group_id, env_id), number in self._leases.items():  # oldest lease first
      _, deadline = self._active[number].leases[env_id]
      if deadline > now:
        break
      overdue.append((group_id, env_id))
    for group_id, env_id in overdue:
      if (group_id, env_id) in self._leases:  # its group may just have been closed
        self._cancel_lease(group_id, env_id, 'timed_out')
    return len(overdue)

  def results(self) -> list[GroupResult]:
    """Returns how the groups taken or filtered since the last call fared, by seed."""
    return self._results.pop()

  async def shutdown(self) -> None:
    """Stops leasing and releases everyone who waits."""
    self._closed = True
    self._wake(range(self.num_env_groups))

  def metrics(self) -> dict[str, float]:
    """Returns counts since the run began, such as `queue/played` and `queue/failed`."""
    return {f'queue/{name}': float(count) for name, count in self.counts.items()}

  def state_dict(self) -> StateDict:
    """Returns the state as JSON; groups not yet taken are stored by number only."""
    return {
      'step': self.step,
      'pending': sorted([*self._active, *self._ready]),
      'numbers': self._numbers.state_dict(),
      'results': self._results.results,
      'counts': dict(self.counts),
    }

  def load_state_dict(self, state: StateDict) -> None:
    """Restores the state; groups that had not been taken are played again.

    Args:
      state: A value that `state_dict` returned.

    Raises:
      ValueError: If an endless queue had another number of env groups.
    """
    self._numbers.load_state_dict(state['numbers'])
    self.step = state['step']
    self.counts = Counter(state.get('counts', {}))  # checkpoints may lack them
    self._results.results = [
      (int(seed), float(accuracy), int(num_samples))
      for seed, accuracy, num_samples in state['results']
    ]
    for group in list(self._active.values()):
      self._close_group(group)
    self._ready.clear()
    for number in state['pending']:
      self._add_group(number)

  # ---- the life of a group

  def _active_groups(self, group_id: int) -> list[GroupState]:
    """Returns the groups that an env group is playing, in the order of numbers."""
    return [group for _, group in sorted(self._active_of[group_id].items())]

  def _add_group(self, number: int) -> GroupState:
    group = GroupState(number, self.step, self._num_started, self._greedy)
    self._active[number] = group
    self._active_of[number % self.num_env_groups][number] = group
    self._wake([number % self.num_env_groups])
    return group

  def _admit_group(self) -> bool:
    """Admits the group with the next number; returns False if there is none."""
    number = self._numbers.allocate()
    if number is not None:
      self._add_group(number)
    return number is not None

  def _cancel_lease(self, group_id: int, env_id: int, cause: str) -> None:
    """Takes a lease back as a failed attempt; `cause` is also the name of a count."""
    group = self._active[self._leases.pop((group_id, env_id))]
    sample_index, _ = group.leases.pop(env_id)
    self.counts[cause] += 1
    if cause == 'abandoned':
      group.num_abandoned[sample_index] += 1
    lease = group.make_lease(sample_index, group_id)
    self._cancellations.append((group_id, env_id, lease))
    rows = group.make_failed_row(sample_index, group_id, cause)
    self._record_failure(group, sample_index, rows)
    self._finalize_if_done(group)

  def _record_failure(
    self, group: GroupState, sample_index: int, rows: SampleRows
  ) -> None:
    self._failures.record_episode(rows)
    # The same task has the same prompt.
    max_retries = 0 if rows[-1].stop_reason == 'prompt_too_long' else self._max_retries
    retry = group.should_retry(sample_index, max_retries)
    self.counts['retried' if retry else 'failed'] += 1
    self.counts[f'stopped/{rows[-1].stop_reason}'] += 1
    if not retry:
      group.failed[sample_index] = rows

  def _finalize_if_done(self, group: GroupState) -> None:
    """Finishes the group once it is full or no more samples can be added."""
    is_full = group.num_valid >= self.group_size and group.has_baseline
    if not is_full and not group.all_done:
      self._wake([group.number % self.num_env_groups])
      return
    self._close_group(group)
    if not group.played and not group.failed:
      self.counts['unplayed'] += 1  # the data ended before this group began
      return
    rows = group.collect_rows(self.group_size, self._keep_failed)
    is_short = group.num_valid < self._min_valid or not group.has_baseline
    if is_short and not (self._keep_failed and group.failed):
      self._drop_group('dropped', DropReason('dropped', group.failure_summary()))
    else:
      self._process_group(group, rows)

  def _process_group(self, group: GroupState, rows: Group) -> None:
    """Filters and shapes a finished group; keeps it for the trainer, or drops it."""
    group_id = group.number % self.num_env_groups
    try:
      rows, drop = self._pipeline.process(group_id, group.number - group_id, rows)
    except Exception as error:  # a fault of the user's code ends the run, not the env
      self._error = error
      self._changed.set()
      return
    if drop is not None:
      self._results.record(rows)
      self.counts[f'filtered/{drop.name}'] += 1
      self._drop_group('filtered', drop)
      return
    self._drops.record_kept()
    self.counts['whole'] += 1
    self._ready.add(group.number, group.start_step, rows)
    self._changed.set()

  def _drop_stale(self, min_version: int) -> None:
    """Drops groups, finished or in play, with a token that older weights wrote."""
    oldest_versions = self._ready.older_than(min_version)
    for number in oldest_versions:
      del self._ready[number]
    for group in list(self._active.values()):
      if group.oldest_version is not None and group.oldest_version < min_version:
        oldest_versions[group.number] = group.oldest_version
        self._close_group(group)
    for oldest in oldest_versions.values():
      reason = (
        f'it has tokens written by the weights of step {oldest}, but step '
        f'{min_version} or later is required'
      )
      self._drop_group('stale', DropReason('stale', reason))

  def _drop_group(self, count_name: str, drop: DropReason) -> None:
    """Counts a dropped group and admits another in its place."""
    self.counts[count_name] += 1
    self._error = self._error or self._drops.record_drop(drop)
    if self._error is None and self.num_groups > 0:
      self._admit_group()
    self._changed.set()

  def _close_group(self, group: GroupState) -> None:
    """Removes a group from play and takes its leases back."""
    del self._active[group.number]
    del self._active_of[group.number % self.num_env_groups][group.number]
    group_id = group.number % self.num_env_groups
    for env_id, (sample_index, _) in group.leases.items():
      del self._leases[group_id, env_id]
      self.counts['surplus'] += 1
      lease = group.make_lease(sample_index, group_id)
      self._cancellations.append((group_id, env_id, lease))
    self._wake([group_id])

  def _wake(self, group_ids: Iterable[int]) -> None:
    """Wakes the environments that wait in these env groups, and the trainer."""
    for group_id in group_ids:
      for future in self._waiters.pop(group_id, []):
        if not future.done():
          future.set_result(None)
    self._changed.set()


def _validate_sizes(
  num_groups: int, group_size: int, num_env_groups: int, min_group_size: int
) -> None:
  if num_groups == 0 or num_groups < -1:
    raise ValueError(f'num_groups must be positive or -1, not {num_groups}')
  if min(group_size, num_env_groups) < 1:
    raise ValueError('group_size and num_env_groups must be at least 1')
  if not 0 <= min_group_size <= group_size:
    raise ValueError(f'min_group_size must lie within [0, {group_size}]')
