"""The group pipeline filters and shapes finished groups, and counts those dropped.

`GroupPipeline.process` decides what happens to a finished group. `DropTracker` makes
it an error to drop too many groups in a row, because the batch would never be filled.
"""

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxrl.envs.env_registry import is_valid_reward
from jaxrl.group_stats import sample_scores
from jaxrl.types import Group, Trajectory
from jaxrl.user_code import user_place

# What groups are dropped for, if that is not the name of a filter.
CAUSES = {'dropped': 'failed episodes', 'stale': 'staleness'}
# What helps when groups are dropped for a reason that no filter explains.
HINTS = {
  'dropped': 'see why episodes fail: python -m launch.play, with this config',
  'stale': 'raise the bound (rollout.staleness_policy, or max_staleness of the '
  'sampler), lower rollout.async_ratio, or play faster',
}


class DropReason(NamedTuple):
  """Explains why a group is not trained on.

  Attributes:
    name: The filter's name, or 'dropped' or 'stale'; it becomes a metric's name.
    reason: What is wrong with this group.
    hint: What the user can do about it.
  """

  name: str
  reason: str
  hint: str = ''


# Called with group_id, episode_id and the group; True or a `DropReason` drops it.
# A filter may also have a method `drop_invalid`, which is called first.
GroupFilterFn = Callable[[int, int, Group], bool | DropReason | None]
RewardShaperFn = Callable[[Group], Group]


class GroupPipeline:
  """Removes invalid samples, drops groups, and shapes the groups that are kept."""

  def __init__(
    self,
    group_filter: GroupFilterFn | None,
    shaper: RewardShaperFn | None,
    *,
    min_samples: int,
    needs_greedy: bool,
  ):
    """Creates a pipeline.

    Args:
      group_filter: Decides which groups are dropped; None drops none.
      shaper: Changes the rewards and weights of groups that are kept; None for none.
      min_samples: A group with fewer valid samples, not counting greedy, is dropped.
      needs_greedy: Whether a group without its greedy sample is dropped.
    """
    self._filter = group_filter
    self._shaper = shaper
    self._min_samples = min_samples
    self._needs_greedy = needs_greedy

  def process(
    self, group_id: int, episode_id: int, group: Group
  ) -> tuple[Group, DropReason | None]:
    """Filters and shapes one finished group.

    Args:
      group_id: The env group.
      episode_id: Its episode.
      group: The rows of all samples.

    Returns:
      The rows to train on and None; or the unchanged rows and why they are dropped.

    Raises:
      Exception: Whatever the filter or the shaper raises, with a note that says so.
    """
    part = 'a group filter'
    try:
      valid_rows, drop = self._drop_invalid(group)
      if drop is None and self._filter is not None:
        verdict = self._filter(group_id, episode_id, valid_rows)
        if isinstance(verdict, DropReason):
          drop = verdict
        elif verdict:
          drop = DropReason('group_filter', 'the group filter drops it')
      if drop is not None:
        return group, drop
      part = 'a reward shaper'
      shaped = self._shaper(valid_rows) if self._shaper is not None else valid_rows
      drop = _find_invalid_reward(shaped)
      return (group, drop) if drop is not None else (shaped, None)
    except Exception as error:
      place = user_place(error)  # a traceback is lost on the way to another process
      error.add_note(f'raised by {part}' + (f' ({place})' if place else ''))
      raise

  def _drop_invalid(self, group: Group) -> tuple[Group, DropReason | None]:
    """Removes invalid samples; returns a reason if too few samples are left."""
    drop_invalid = getattr(self._filter, 'drop_invalid', None)
    if drop_invalid is None:
      return group, None
    valid_rows, drop = drop_invalid(group)
    too_few = len(sample_scores(valid_rows)) < self._min_samples
    has_greedy = any(row.is_greedy for row in valid_rows)
    if drop and (too_few or (self._needs_greedy and not has_greedy)):
      return group, drop
    return valid_rows, None


def _find_invalid_reward(group: Group) -> DropReason | None:
  """Returns a reason to drop a group that has a reward which cannot be trained on."""
  scores = (row.score for row in group)
  invalid = next((score for score in scores if not is_valid_reward(score)), None)
  if invalid is None:
    return None
  reason = f'a row has a score of {invalid:.3g} after reward shaping'
  return DropReason('invalid_reward', reason, 'check the options of reward_shaping')


def try_group_function(
  function: Callable[..., object], where: str, check: Callable[[Any], None]
) -> None:
  """Calls a user's filter or shaper once with a made-up group, before the run starts.

  Args:
    function: Takes a group.
    where: What error messages begin with.
    check: Raises for a result of another kind. If the function raises, which it may as
      the made-up rows lack what those of its environment have, there is none.

  Raises:
    ValueError: If the function cannot be called with a group alone.
  """
  try:
    inspect.signature(function).bind(None)
  except TypeError as error:
    raise ValueError(f'{where} cannot be called as (group): {error}') from error
  rows = [
    Trajectory(
      tokens=np.arange(4, dtype=np.int32),
      action_mask=np.array([False, False, True, True]),
      rollout_logprobs=np.zeros(4, np.float32),
      rewards=np.array([0, 0, 0, i], np.float32),
      weights_version=np.array([-1, -1, 0, 0], np.int32),
      sample_index=i,
      messages=[{'role': 'assistant', 'content': ''}],
    )
    for i in range(2)
  ]
  try:
    result = function(rows)
  except Exception:
    return
  check(result)


class InsufficientGroupsError(RuntimeError):
  """Too many groups were dropped in a row, so the batch cannot be filled."""


class StoreTimeoutError(InsufficientGroupsError):
  """No explorer has written a group for as long as the trainer may wait."""


class StopRequested(Exception):
  """The user asked to stop while the run waited, as for groups or an evaluation."""


class DropTracker:
  """Counts the groups dropped since the last one kept, and since the last batch."""

  def __init__(self, max_drops: int):
    """Creates a tracker.

    Args:
      max_drops: How many groups may be dropped in a row before it is an error.

    Raises:
      ValueError: If `max_drops` is less than 1.
    """
    if max_drops < 1:
      raise ValueError(f'max_consecutive_drops must be at least 1, not {max_drops}')
    self._max_drops = max_drops
    self._num_in_a_row = 0
    self._num_stale = 0
    self._num_kept = 0
    self._num_by_name: Counter[str] = Counter()

  def record_kept(self) -> None:
    """Counts a group that is kept."""
    self._num_in_a_row = 0
    self._num_kept += 1

  def reset(self) -> None:
    """Starts anew after a batch; consecutive drops are still counted."""
    self._num_kept = self._num_stale = 0
    self._num_by_name.clear()

  def record_drop(self, drop: DropReason) -> InsufficientGroupsError | None:
    """Counts a dropped group.

    A stale group was kept before it became too old, so stale groups are counted
    separately.

    Args:
      drop: Why the group is dropped.

    Returns:
      The error to raise if this was one drop too many, else None.
    """
    is_stale = drop.name == 'stale'
    self._num_by_name[drop.name] += 1
    if is_stale:
      self._num_stale += 1
    else:
      self._num_in_a_row += 1
    num_dropped = max(self._num_in_a_row, self._num_stale)
    if num_dropped < self._max_drops:
      return None
    num_not_stale = sum(self._num_by_name.values()) - self._num_by_name['stale']
    num_tried = self._num_kept + num_not_stale
    reasons = ', '.join(
      f'{n} for {CAUSES.get(name, name)}' for name, n in self._num_by_name.most_common()
    )
    hint = drop.hint or HINTS.get(drop.name, 'loosen the filter')
    return InsufficientGroupsError(
      f'{num_dropped} groups in a row were dropped and none was kept, so the batch '
      f'cannot be filled (rollout.max_consecutive_drops={self._max_drops}). Since the '
      f'last batch, {num_tried} groups were played; dropped: {reasons}. The last was '
      f'dropped because: {drop.reason}. What may help: {hint}'
    )
