"""Group allocation decides how many groups each environment tag plays and numbers them.

The groups of a tag are numbered 0, 1, 2 … With G env groups, group number `i` is played
by env group `i % G` as its episode `i − i % G`.
"""

from collections.abc import Mapping

from jaxrl.types import StateDict


def allocate_groups(num_groups: int, shares: Mapping[str, float]) -> dict[str, int]:
  """Splits the groups of a step among environment tags by largest remainder.

  Ties go to the first tag.

  Args:
    num_groups: Number of groups of one step, over all tags.
    shares: Weight of each tag. Only the ratios matter.

  Returns:
    The number of groups of each tag; they sum to `num_groups`.

  Raises:
    ValueError: If a share is not positive and finite, or if a tag would get no group.
  """
  for tag, share in shares.items():
    if not 0 < share < float('inf'):
      raise ValueError(f'env.{tag}.weight={share}: must be positive')
  total = sum(shares.values())
  exact = {tag: num_groups * share / total for tag, share in shares.items()}
  allocated = {tag: int(value) for tag, value in exact.items()}
  by_remainder = sorted(
    allocated, key=lambda tag: allocated[tag] - round(exact[tag], 9)
  )
  for tag in by_remainder[: num_groups - sum(allocated.values())]:
    allocated[tag] += 1
  empty_tags = [tag for tag in allocated if not allocated[tag]]
  if empty_tags:
    raise ValueError(
      f'batch.num_groups={num_groups}: each of the {len(allocated)} '
      f'environment tags needs at least one group per step, but '
      f'{", ".join(empty_tags)} gets none; raise it, or '
      f'env.{empty_tags[0]}.weight'
    )
  return allocated


class GroupIdAllocator:
  """Hands out group numbers in order, until the data ends.

  A queue with a fixed number of groups per step numbers all env groups from one
  counter. An endless queue, which plays until the data is exhausted, keeps one counter
  per env group.

  Attributes:
    end: The first number for which there is no data, or None while it is unknown.
  """

  def __init__(self, num_env_groups: int, end: int | None, *, endless: bool):
    """Creates an allocator that starts at group number 0.

    Args:
      num_env_groups: G, the number of env groups.
      end: The first number for which there is no data, if it is known.
      endless: Whether every env group has a counter of its own.
    """
    self.end = end
    self._endless = endless
    self._next = list(range(num_env_groups)) if endless else [0]

  def allocate(self, group_id: int = 0) -> int | None:
    """Takes the next group number.

    Args:
      group_id: The env group that will play the group; only read if endless.

    Returns:
      The number, or None if there is no more data.
    """
    if self.exhausted(group_id):
      return None
    counter = self._counter(group_id)
    number = self._next[counter]
    self._next[counter] += len(self._next)
    return number

  def set_end(self, number: int) -> None:
    """Records that there is no data for `number` and any later number."""
    self.end = number if self.end is None else min(self.end, number)

  def exhausted(self, group_id: int) -> bool:
    """Returns whether no number is left for this env group."""
    return self.end is not None and self._next[self._counter(group_id)] >= self.end

  @property
  def all_exhausted(self) -> bool:
    """Returns whether no number is left for any env group."""
    return self.end is not None and min(self._next) >= self.end

  def _counter(self, group_id: int) -> int:
    return group_id if self._endless else 0

  def state_dict(self) -> StateDict:
    """Returns the counters as JSON values."""
    return {'next': list(self._next), 'end': self.end}

  def load_state_dict(self, state: StateDict) -> None:
    """Restores the counters.

    Args:
      state: A value that `state_dict` returned.

    Raises:
      ValueError: If the checkpoint was written with another number of counters.
    """
    if len(state['next']) != len(self._next):
      raise ValueError(
        f'the checkpoint has {len(state["next"])} group counters, but this queue has '
        f'{len(self._next)}: keep num_env_groups unchanged to resume'
      )
    self._next, self.end = list(state['next']), state['end']
