"""One group while its members are being played."""

import dataclasses
from collections import Counter

import numpy as np

from jaxrl.types import Group, Trajectory

Rows = list[Trajectory]  # one attempt: one row, or one per turn


@dataclasses.dataclass
class GroupState:
  """number: the group's. start_step: when it was admitted. members: attempts begun.

  leases: env_id → (member, deadline). played, failed: member → its rows. ended:
  members for which the data set had no more. attempts: how often each failed.
  """

  number: int
  start_step: int
  members: int
  leases: dict[int, tuple[int, float]] = dataclasses.field(default_factory=dict)
  played: dict[int, Rows] = dataclasses.field(default_factory=dict)
  failed: dict[int, Rows] = dataclasses.field(default_factory=dict)
  ended: set[int] = dataclasses.field(default_factory=set)
  attempts: Counter[int] = dataclasses.field(default_factory=Counter)

  def free_member(self) -> int | None:
    """The first member no one plays or has played."""
    leased = {member for member, _ in self.leases.values()}
    for member in range(self.members):
      if member not in leased and not self._done(member):
        return member
    return None

  def _done(self, member: int) -> bool:
    return member in self.played or member in self.failed or member in self.ended

  @property
  def accounted(self) -> bool:
    """Whether every member has been played, has failed or found no data."""
    return all(self._done(member) for member in range(self.members))

  def rows(self, size: int, keep_failed: bool) -> Group:
    """Rows in the order of members: `size` sound ones, then failed ones if kept."""
    members = sorted(self.played)[:size]
    if keep_failed:
      members = sorted([*members, *sorted(self.failed)[: size - len(members)]])
    attempts = {**self.played, **self.failed}
    return [row for member in members for row in attempts[member]]

  def reasons(self) -> str:
    """Why members failed, for people."""
    rows = [rows[-1] for rows in self.failed.values() if rows]
    errors = [row.extras.get('error', '') for row in rows]
    counted = Counter(row.stop_reason for row in rows)
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
