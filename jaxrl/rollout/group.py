"""One group while its members are being played, and how groups are numbered."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxrl.data.trajectories import oldest_version
from jaxrl.rollout.members import Rows
from jaxrl.types import Group, Trajectory

ABANDONED = 3  # so many abandoned attempts of a member are no retries


class Lease(NamedTuple):
  """The right to play one attempt: `member` of the group's task, once.

  start_step: the trainer's step when the group was admitted. attempt: 0, or how
  often this member has failed before; the seed is the same at every attempt. greedy:
  it is the group's baseline, played at temperature 0.
  """

  group_id: int
  episode_id: int
  member: int
  start_step: int
  attempt: int
  greedy: bool = False


class Numbers:
  """Gives out group numbers: to all alike, or if endless to each env group its own.

  end: the first number that has no data, once known.
  """

  def __init__(self, num_env_groups: int, end: int | None, *, endless: bool):
    self.end = end
    self._endless = endless
    self._next = list(range(num_env_groups)) if endless else [0]

  def take(self, group_id: int = 0) -> int | None:
    """The next number (of this env group); None when there is no more data."""
    if self.over(group_id):
      return None
    line = group_id if self._endless else 0
    number = self._next[line]
    self._next[line] += len(self._next)
    return number

  def cut(self, number: int) -> None:
    """From `number` on there is no data."""
    self.end = number if self.end is None else min(self.end, number)

  def over(self, group_id: int) -> bool:
    """Whether nothing is left (for this env group)."""
    line = group_id if self._endless else 0
    return self.end is not None and self._next[line] >= self.end

  @property
  def all_over(self) -> bool:
    return all(self.over(line) for line in range(len(self._next)))

  def state(self) -> dict[str, Any]:
    return {'next': list(self._next), 'end': self.end}

  def load(self, state: Mapping[str, Any]) -> None:
    """Raises ValueError if there are more or fewer lines of numbers than before."""
    if len(state['next']) != len(self._next):
      raise ValueError(
        f'the checkpoint was written with {len(state["next"])} lines of groups, '
        f'there are now {len(self._next)}: keep num_env_groups to resume'
      )
    self._next, self.end = list(state['next']), state['end']


@dataclasses.dataclass
class GroupState:
  """number: the group's. start_step: when it was admitted. members: attempts begun.
  greedy: there is one more, the last, that the group needs and no other replaces.

  leases: env_id → (member, deadline). played, failed: member → its rows. ended:
  members for which the data set had no more. attempts: how often each failed;
  abandoned: how often of these its worker was lost, and not the episode at fault.
  oldest: the version of the oldest token that a sound member has; None before any.
  """

  number: int
  start_step: int
  members: int
  greedy: bool = False
  leases: dict[int, tuple[int, float]] = dataclasses.field(default_factory=dict)
  played: dict[int, Rows] = dataclasses.field(default_factory=dict)
  failed: dict[int, Rows] = dataclasses.field(default_factory=dict)
  ended: set[int] = dataclasses.field(default_factory=set)
  attempts: Counter[int] = dataclasses.field(default_factory=Counter)
  abandoned: Counter[int] = dataclasses.field(default_factory=Counter)
  oldest: int | None = None

  def add(self, member: int, rows: Rows) -> None:
    """A member has been played, and is sound."""
    self.played[member] = rows
    versions = [v for v in (self.oldest, oldest_version(rows)) if v is not None]
    self.oldest = min(versions, default=None)

  def lease(self, member: int, group_id: int) -> Lease:
    """The lease of a member, at its present attempt."""
    episode_id = self.number - group_id
    attempt = self.attempts[member]
    greedy = member == self.members
    return Lease(group_id, episode_id, member, self.start_step, attempt, greedy)

  def again(self, member: int, retries: int) -> bool:
    """Counts a failed attempt; whether the member may be played once more."""
    self.attempts[member] += 1
    return self.attempts[member] <= retries + min(self.abandoned[member], ABANDONED)

  def free_member(self) -> int | None:
    """The first member no one plays or has played."""
    leased = {member for member, _ in self.leases.values()}
    for member in self._all():
      if member not in leased and not self._done(member):
        return member
    return None

  def _all(self) -> range:
    return range(self.members + self.greedy)

  @property
  def sound(self) -> int:
    """How many sampled members have been played."""
    return sum(member < self.members for member in self.played)

  @property
  def has_baseline(self) -> bool:
    """Whether the greedy member has been played, if the group needs one."""
    return not self.greedy or self.members in self.played

  def _done(self, member: int) -> bool:
    return member in self.played or member in self.failed or member in self.ended

  @property
  def accounted(self) -> bool:
    """Whether every member has been played, has failed or found no data."""
    return all(self._done(member) for member in self._all())

  def rows(self, size: int, keep_failed: bool) -> Group:
    """Rows in the order of members: `size` sound ones, failed ones if kept, greedy."""
    members = sorted(m for m in self.played if m < self.members)[:size]
    if keep_failed:
      members = sorted([*members, *sorted(self.failed)[: size - len(members)]])
    attempts = {**self.played, **self.failed}
    if self.greedy and self.members in self.played:
      members.append(self.members)
    return [row for member in members for row in attempts[member]]

  def reasons(self) -> str:
    """Why members failed, for people."""
    rows = [rows[-1] for rows in self.failed.values() if rows]
    errors = [row.extras.get('error', '') for row in rows]
    counted = Counter(row.stop_reason for row in rows)
    if self.ended:
      counted['the data had no more'] = len(self.ended)
    text = ', '.join(f'{count} × {reason}' for reason, count in counted.items())
    return f'{text} {next(filter(None, errors), "")}'.strip()

  def missing(self, member: int, group_id: int, why: str) -> Rows:
    """Stands for an attempt that never came back."""
    empty = np.zeros(0, np.float32)
    row = Trajectory(
      tokens=empty.astype(np.int32),
      action_mask=empty.astype(bool),
      rollout_logprobs=empty,
      rewards=empty,
      weights_version=empty.astype(np.int32),
      group_id=group_id,
      episode_id=self.number - group_id,
      member=member,
      stop_reason='env_timeout' if why == 'timed_out' else 'abort',
    )
    row.extras['error'] = f'its lease was {why.replace("_", " ")}'
    return [row]
