"""Group state tracks the samples of every group until the trainer takes it.

A lease is the right of a worker to play one sample before a deadline.

`GroupState` is a group whose samples are being played, `ReadyGroups` holds the finished
groups that wait for the trainer, `CancellationLog` announces leases that the queue took
back, `GroupResults` collects accuracies for curricula, and `FailureLog` logs why
episodes fail.
"""

import asyncio
import dataclasses
import logging
import re
from collections import Counter
from typing import NamedTuple, Protocol

import numpy as np

from jaxrl.group_stats import (
  GroupResult,
  SampleRows,
  oldest_weights_version,
  sample_accuracies,
)
from jaxrl.types import Group, MaybeAwaitable, Trajectory

log = logging.getLogger(__name__)

# Attempts of one sample whose worker was lost that do not count as retries.
MAX_FREE_RETRIES = 3
_MAX_CANCELLATIONS = 4096  # the log forgets older entries

# How `describe_error` ends if it knows the place in a user's code.
_PLACE = re.compile(r'\(([^()]+, line \d+)\)')


class EpisodeLease(NamedTuple):
  """Grants an environment the right to play one sample of a group once.

  Attributes:
    env_group: The env group.
    episode_id: The episode of the env group. Together they name the task.
    sample_index: Which sample of the group is played.
    start_step: The trainer's step when the group was admitted.
    attempt: How often this sample has failed before. The episode seed is the same at
      every attempt.
    greedy: Whether this is the group's baseline, played at temperature 0.
  """

  env_group: int
  episode_id: int
  sample_index: int
  start_step: int
  attempt: int
  greedy: bool = False


class EpisodeQueue(Protocol):
  """Leases episodes and takes what was played: a `GroupQueue`, or a handle to one."""

  def get_episode_id(
    self, group_id: int, env_id: int
  ) -> MaybeAwaitable[EpisodeLease | None]:
    """Leases the next sample of an env group, as `GroupQueue.get_episode_id`."""
    ...

  def put(
    self,
    group_id: int,
    episode_id: int,
    start_step: int,
    rollout: SampleRows | None,
    env_id: int,
  ) -> MaybeAwaitable[bool]:
    """Puts the rows of a leased episode, as `GroupQueue.put`."""
    ...


# A lease that was taken back, as (group_id, env_id, lease).
Cancellation = tuple[int, int, EpisodeLease]


class CancellationLog:
  """Records the leases that the queue took back, for the workers that play them.

  Readers wait for entries that follow a position; old entries are forgotten in time.
  """

  def __init__(self):
    """Creates an empty log."""
    self._entries: list[Cancellation] = []
    self._num_forgotten = 0
    self._appended = asyncio.Event()

  def append(self, cancellation: Cancellation) -> None:
    """Adds an entry and wakes all readers."""
    self._entries.append(cancellation)
    surplus = len(self._entries) - _MAX_CANCELLATIONS
    if surplus > 0:
      del self._entries[:surplus]
      self._num_forgotten += surplus
    self._appended.set()

  async def wait(self, position: int) -> tuple[int, list[Cancellation]]:
    """Waits for entries from `position` on.

    Args:
      position: Where to continue reading; 0 at first.

    Returns:
      The position to pass next time, and the new entries.
    """
    while self._num_forgotten + len(self._entries) <= position:
      self._appended.clear()
      await self._appended.wait()
    start = max(position - self._num_forgotten, 0)
    return self._num_forgotten + len(self._entries), self._entries[start:]


@dataclasses.dataclass
class GroupState:
  """Tracks one group while its samples are being played.

  Attributes:
    number: The group's number within its queue.
    start_step: The trainer's step when the group was admitted.
    num_samples: How many samples are started, surplus samples included.
    greedy: Whether there is one more sample, the last, which is played greedily. The
      group needs it, and no other sample can replace it.
    leases: The sample and the deadline of each lease, by env id.
    played: The rows of samples that were played without failure, by sample index.
    failed: The rows of samples that failed for good, by sample index.
    out_of_data: The samples for which the data set had no task.
    num_failures: How often each sample failed.
    num_abandoned: How many of these failures lost the worker and not the episode.
    oldest_version: The weights version of the oldest token in `played`, or None.
  """

  number: int
  start_step: int
  num_samples: int
  greedy: bool = False
  leases: dict[int, tuple[int, float]] = dataclasses.field(default_factory=dict)
  played: dict[int, SampleRows] = dataclasses.field(default_factory=dict)
  failed: dict[int, SampleRows] = dataclasses.field(default_factory=dict)
  out_of_data: set[int] = dataclasses.field(default_factory=set)
  num_failures: Counter[int] = dataclasses.field(default_factory=Counter)
  num_abandoned: Counter[int] = dataclasses.field(default_factory=Counter)
  oldest_version: int | None = None

  def add_played(self, sample_index: int, rows: SampleRows) -> None:
    """Records the rows of a sample that was played without failure."""
    self.played[sample_index] = rows
    versions = [self.oldest_version, oldest_weights_version(rows)]
    self.oldest_version = min((v for v in versions if v is not None), default=None)

  def make_lease(self, sample_index: int, group_id: int) -> EpisodeLease:
    """Creates the lease of a sample's present attempt."""
    return EpisodeLease(
      group_id,
      self.number - group_id,
      sample_index,
      self.start_step,
      attempt=self.num_failures[sample_index],
      greedy=sample_index == self.num_samples,
    )

  def should_retry(self, sample_index: int, max_retries: int) -> bool:
    """Counts a failed attempt and tells whether the sample may be played again.

    Args:
      sample_index: The sample that failed.
      max_retries: How often a sample may be played again. Attempts whose worker was
        lost do not count, up to MAX_FREE_RETRIES of them.

    Returns:
      True if the sample should be played once more.
    """
    self.num_failures[sample_index] += 1
    free_retries = min(self.num_abandoned[sample_index], MAX_FREE_RETRIES)
    return self.num_failures[sample_index] <= max_retries + free_retries

  def next_unplayed(self) -> int | None:
    """Returns the first sample that is neither leased nor done, or None."""
    leased = {sample_index for sample_index, _ in self.leases.values()}
    for sample_index in self._sample_indices():
      if sample_index not in leased and not self._is_done(sample_index):
        return sample_index
    return None

  def _sample_indices(self) -> range:
    return range(self.num_samples + self.greedy)

  def _is_done(self, sample_index: int) -> bool:
    return (
      sample_index in self.played
      or sample_index in self.failed
      or sample_index in self.out_of_data
    )

  @property
  def num_valid(self) -> int:
    """Returns the number of samples played without failure, without the greedy one."""
    return sum(sample_index < self.num_samples for sample_index in self.played)

  @property
  def has_baseline(self) -> bool:
    """Returns whether the greedy sample has been played, or the group needs none."""
    return not self.greedy or self.num_samples in self.played

  @property
  def all_done(self) -> bool:
    """Returns whether every sample was played, failed for good, or found no data."""
    return all(self._is_done(sample_index) for sample_index in self._sample_indices())

  def collect_rows(self, group_size: int, keep_failed: bool) -> Group:
    """Gathers the rows of the finished group, in the order of samples.

    Args:
      group_size: At most this many samples are taken, the first valid ones.
      keep_failed: Whether failed samples fill the group up to `group_size`.

    Returns:
      The rows, those of the greedy sample last.
    """
    valid = [index for index in self.played if index < self.num_samples]
    indices = sorted(valid)[:group_size]
    if keep_failed:
      num_missing = group_size - len(indices)
      indices = sorted([*indices, *sorted(self.failed)[:num_missing]])
    if self.greedy and self.num_samples in self.played:
      indices.append(self.num_samples)
    rows = {**self.played, **self.failed}
    return [row for index in indices for row in rows[index]]

  def failure_summary(self) -> str:
    """Describes in one line why samples failed, with the first error."""
    last_rows = [rows[-1] for rows in self.failed.values() if rows]
    errors = [row.extras.get('error', '') for row in last_rows]
    num_by_reason = Counter(row.stop_reason for row in last_rows)
    if self.out_of_data:
      num_by_reason['the data set has no more tasks'] = len(self.out_of_data)
    reasons = ', '.join(
      f'{count} × {reason}' for reason, count in num_by_reason.items()
    )
    error = next(filter(None, errors), '')
    return f'{reasons}: {error}' if error else reasons

  def make_failed_row(self, sample_index: int, group_id: int, cause: str) -> SampleRows:
    """Creates the row that stands for an attempt whose lease was taken back.

    Args:
      sample_index: The sample that was being played.
      group_id: The env group that played it.
      cause: 'timed_out' or 'abandoned'.

    Returns:
      One row without tokens, whose stop reason is a failure.
    """
    empty = np.zeros(0, np.float32)
    row = Trajectory(
      tokens=empty.astype(np.int32),
      action_mask=empty.astype(bool),
      rollout_logprobs=empty,
      rewards=empty,
      weights_version=empty.astype(np.int32),
      env_group=group_id,
      episode_id=self.number - group_id,
      sample_index=sample_index,
      stop_reason='env_timeout' if cause == 'timed_out' else 'abort',
    )
    row.extras['error'] = (
      'no result within rollout.episode_timeout'
      if cause == 'timed_out'
      else 'the worker that played it was lost'
    )
    return [row]


class ReadyGroup(NamedTuple):
  """A finished group that waits for the trainer.

  Attributes:
    start_step: The trainer's step when the group was admitted.
    oldest_version: The weights version of its oldest token, None if no weights wrote
      any of them.
    rows: The rows to train on.
  """

  start_step: int
  oldest_version: int | None
  rows: Group


class ReadyGroups(dict[int, ReadyGroup]):
  """Holds the finished groups by number until the trainer takes them."""

  def add(self, number: int, start_step: int, rows: Group) -> None:
    """Stores a finished group."""
    self[number] = ReadyGroup(start_step, oldest_weights_version(rows), rows)

  def take(self, number: int) -> Group:
    """Removes a group and returns its rows."""
    return self.pop(number).rows

  def expire(self, oldest_step: int) -> int:
    """Discards the groups admitted before a step.

    Args:
      oldest_step: Groups admitted at this step or later stay.

    Returns:
      The number of groups discarded.
    """
    expired = [n for n, ready in self.items() if ready.start_step < oldest_step]
    for number in expired:
      del self[number]
    return len(expired)

  def older_than(self, version: int) -> dict[int, int]:
    """Finds the groups with a token that weights before `version` wrote.

    Args:
      version: The oldest weights version that is acceptable.

    Returns:
      The oldest version of each such group, by group number.
    """
    return {
      number: ready.oldest_version
      for number, ready in self.items()
      if ready.oldest_version is not None and ready.oldest_version < version
    }


class GroupResults:
  """Collects the mean accuracy of groups by episode seed, for curricula.

  Attributes:
    results: The results that nobody has popped yet.
  """

  def __init__(self):
    """Starts without results."""
    self.results: list[GroupResult] = []

  def record(self, group: Group) -> None:
    """Adds the result of a group; one without samples is skipped."""
    accuracies = sample_accuracies(group)
    if len(accuracies):
      mean = float(accuracies.mean())
      self.results.append((group[0].episode_seed, mean, len(accuracies)))

  def pop(self) -> list[GroupResult]:
    """Returns the results since the last call, sorted by seed, and forgets them."""
    results, self.results = sorted(self.results), []
    return results


class FailureLog:
  """Logs why episodes fail: once for each place in a user's code, or type of error.

  Most failures cost an episode each, which is played again, so a log of all of them
  would hide everything else. It can be pickled, and remembers what it has logged.
  `take` passes on what a log in another process has logged.
  """

  def __init__(self):
    """Creates a log that has logged nothing."""
    self._logged: set[tuple[str, str]] = set()
    self._new: list[tuple[str, str, str]] = []

  def record(self, tag: str, what: str, error: str) -> None:
    """Logs an error, unless one like it has been logged.

    Args:
      tag: The environment's tag.
      what: What the error ended, to begin the message with.
      error: The error, as `describe_error` describes it.
    """
    place = _PLACE.search(error)
    key = tag, place[1] if place else f'{what} {error.partition(":")[0]}'
    if key not in self._logged:
      self._logged.add(key)
      self._new.append((tag, what, error))
      log.warning('env.%s: %s: %s', tag, what, error)

  def record_episode(self, rows: SampleRows) -> None:
    """Logs why an episode failed, if an error says so.

    Args:
      rows: The rows of the episode.
    """
    error = rows[-1].extras.get('error') if rows else ''
    if error and rows[-1].failed and rows[-1].stop_reason != 'abort':
      what = f'an episode failed with {rows[-1].stop_reason} (shown once)'
      self.record(rows[-1].tag, what, str(error))

  def take(self) -> list[tuple[str, str, str]]:
    """Returns the arguments of `record` for what was logged since the last call."""
    new, self._new = self._new, []
    return new
