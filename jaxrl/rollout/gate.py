"""What a group passes between being played and being trained on."""

from collections.abc import Callable

from jaxrl.rollout.lost import Drop
from jaxrl.rollout.members import scores
from jaxrl.types import Group

# True or a `Drop` drops the group; a method `without_invalid` is asked before.
Filter = Callable[[int, int, Group], bool | Drop | None]
Shaper = Callable[[Group], Group]


class Gate:
  """Takes invalid attempts out of groups, drops groups, shapes those that are kept.

  least: sampled members a group must keep. greedy: it must keep its greedy one too.
  """

  def __init__(
    self, drops: Filter | None, shaper: Shaper | None, *, least: int, greedy: bool
  ):
    self._drops, self._shaper = drops, shaper
    self._least, self._greedy = least, greedy

  def judge(
    self, group_id: int, episode_id: int, group: Group
  ) -> tuple[Group, Drop | None]:
    """The group as it is to be trained on; or as it was, and why it is dropped.

    What the user's code raises is noted as theirs.
    """
    try:
      valid, drop = self._valid(group)
      if drop is None and self._drops is not None:
        verdict = self._drops(group_id, episode_id, valid)
        plain = Drop('group_filter', 'the group filter drops it')
        drop = (verdict if isinstance(verdict, Drop) else plain) if verdict else None
      if drop is not None:
        return group, drop
      return (self._shaper(valid) if self._shaper is not None else valid), None
    except Exception as error:
      error.add_note('raised by a group filter or a shaper')
      raise

  def _valid(self, group: Group) -> tuple[Group, Drop | None]:
    """The group without invalid attempts; and why too few are left, if so."""
    sift = getattr(self._drops, 'without_invalid', None)
    if sift is None:
      return group, None
    valid, drop = sift(group)
    baseline = any(row.is_greedy for row in valid)
    short = len(scores(valid)) < self._least or (self._greedy and not baseline)
    return (group, drop) if drop and short else (valid, None)
