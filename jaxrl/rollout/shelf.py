"""Whole groups that wait to be taken, and how groups fared."""

from typing import NamedTuple

from jaxrl.data.curricula import Result
from jaxrl.data.trajectories import oldest_version
from jaxrl.rollout.members import accuracies
from jaxrl.types import Group


class Ready(NamedTuple):
  """start_step: when the group was admitted. oldest: the version of its oldest token,
  None where no weights wrote any.
  """

  start_step: int
  oldest: int | None
  rows: Group


class Shelf(dict[int, Ready]):
  """Groups by number."""

  def put(self, number: int, start_step: int, rows: Group) -> None:
    self[number] = Ready(start_step, oldest_version(rows), rows)

  def take(self, number: int) -> Group:
    return self.pop(number).rows

  def expire(self, oldest_step: int) -> int:
    """Forgets those admitted before a step; how many there were."""
    late = [n for n, ready in self.items() if ready.start_step < oldest_step]
    for number in late:
      del self[number]
    return len(late)

  def older(self, version: int) -> dict[int, int]:
    """Those with a token of weights before `version`: number → its version."""
    return {
      number: ready.oldest
      for number, ready in self.items()
      if ready.oldest is not None and ready.oldest < version
    }


class Results:
  """How groups fared, by seed, until somebody asks."""

  def __init__(self):
    self.kept: list[Result] = []

  def note(self, group: Group) -> None:
    found = accuracies(group)
    if len(found):
      self.kept.append((group[0].episode_seed, float(found.mean()), len(found)))

  def take(self) -> list[Result]:
    found, self.kept = sorted(self.kept), []
    return found
