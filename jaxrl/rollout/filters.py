"""Filters: which groups, and which attempts of a group, are not worth training on.

A filter is made as `Filter(config, env_manager_config, mode)`, with options of its own
by keyword, and asked `filter(group_id, episode_id, group)`; True drops the group,
and another is played in its place. A `Drop` does the same and says why. A filter that
has `invalid(rows)` is asked first of each attempt: what it gives a reason for leaves
the group, which is dropped if too few are left. Validation never filters, greedy
attempts are shown to none, and rewards are those of the environment, not yet shaped.
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np

from jaxrl import signature
from jaxrl.rollout.lost import Drop
from jaxrl.rollout.members import Rows, accuracies, members, sampled, score, scores
from jaxrl.types import Group

STATISTICS = {'mean': np.mean, 'max': np.max, 'min': np.min}
EASY = 'the tasks are too easy: give harder ones, or filter fewer'
HARD = (
  'the tasks are too hard: give easier ones, a better start (config.sft), or more '
  'attempts (algorithm.group_size)'
)


class GroupFilter(Protocol):
  """What a user's class must be."""

  def filter(self, group_id: int, episode_id: int, group: Group) -> bool | Drop: ...


class _Filter:
  """Takes what all filters are given. least_members: fewer, and it drops all groups."""

  least_members = 1

  def __init__(
    self, config: Any = None, env_manager_config: Any = None, mode: str = 'train'
  ):
    del config, env_manager_config, mode


class RewardStd(_Filter):
  """Drops groups whose scores hardly differ: they teach a group baseline nothing.

  threshold: groups with a population standard deviation of at most this are dropped.
  """

  least_members = 2

  def __init__(self, *args: Any, threshold: float = 1e-6):
    super().__init__(*args)
    self._threshold = threshold

  def filter(self, group_id: int, episode_id: int, group: Group) -> bool | Drop:
    found = scores(group)
    # Seven times .7 has a deviation in floats, so equal is asked by itself.
    std = 0.0 if found.max() == found.min() else float(found.std())
    if std > self._threshold:
      return False
    why = f'scores of mean {found.mean():.3g} deviate by {std:.3g}'
    advice = HARD if found.mean() <= 0 else EASY
    return Drop('reward_std', f'{why}, threshold={self._threshold}', advice)


class ScoreRange(_Filter):
  """Keeps groups whose scores' mean, max or min lies within [low, high]."""

  def __init__(
    self,
    *args: Any,
    low: float = 0.0,
    high: float = 1.0,
    of: Literal['mean', 'max', 'min'] = 'mean',
  ):
    super().__init__(*args)
    self._low, self._high, self._of = low, high, of

  def filter(self, group_id: int, episode_id: int, group: Group) -> bool | Drop:
    value = float(STATISTICS[self._of](scores(group)))
    if self._low <= value <= self._high:
      return False
    why = f'the {self._of} of its scores, {value:.3g}, lies outside '
    advice = HARD if value < self._low else EASY
    return Drop('score_range', f'{why}[{self._low}, {self._high}]', advice)


class PassRate(_Filter):
  """Keeps groups of which a share within [low, high] is right.

  right: an attempt is right from this accuracy on, which the environment reports as
  the metric `accuracy`; its return counts where it reports none.
  """

  name = 'pass_rate'

  def __init__(
    self, *args: Any, low: float = 0.1, high: float = 0.9, right: float = 1.0
  ):
    super().__init__(*args)
    self._low, self._high, self._right = low, high, right

  def filter(self, group_id: int, episode_id: int, group: Group) -> bool | Drop:
    right = accuracies(group) >= self._right
    rate = float(right.mean())
    if self._keeps(rate):
      return False
    why = f'{right.sum()} of {len(right)} attempts are right (accuracy ≥ {self._right})'
    lower = f', or a lower {self.name}(right=…)'
    return Drop(self.name, why, HARD + lower if rate < 0.5 else EASY)

  def _keeps(self, rate: float) -> bool:
    return self._low <= rate <= self._high


class Accuracy(PassRate):
  """DAPO's dynamic sampling: drops groups all right or all wrong (arXiv 2503.14476).

  Right is what `pass_rate` calls right: no penalty on length or format enters.
  """

  name = 'accuracy'
  least_members = 2

  def __init__(self, *args: Any, right: float = 1.0):
    super().__init__(*args, low=0.0, high=1.0, right=right)

  def _keeps(self, rate: float) -> bool:
    return 0 < rate < 1


class InvalidReward(_Filter):
  """Takes attempts out of their group whose score is not finite or out of bounds."""

  def __init__(
    self, *args: Any, low: float = -float('inf'), high: float = float('inf')
  ):
    super().__init__(*args)
    self._low, self._high = low, high

  def invalid(self, rows: Rows) -> str:
    """Why an attempt is not to be used; '' when it is."""
    value = score(rows)
    if np.isfinite(value) and self._low <= value <= self._high:
      return ''
    return f'a score of {value:.3g} lies outside [{self._low}, {self._high}]'

  def filter(self, group_id: int, episode_id: int, group: Group) -> bool | Drop:
    return False


FILTERS: dict[str, type] = {
  'reward_std': RewardStd,
  'score_range': ScoreRange,
  'accuracy': Accuracy,
  'pass_rate': PassRate,
  'invalid_reward': InvalidReward,
}


class Filters:
  """Several filters, asked in turn. named: (name, filter) of each."""

  def __init__(self, named: Sequence[tuple[str, Any]]):
    self._named = list(named)

  def __call__(self, group_id: int, episode_id: int, group: Group) -> Drop | None:
    """Why the group is dropped; None when it is kept."""
    for name, made in self._named:
      verdict = made.filter(group_id, episode_id, sampled(group))
      if isinstance(verdict, Drop):
        return verdict
      if verdict:
        return Drop(name, f'{name} drops it')
    return None

  def without_invalid(self, group: Group) -> tuple[Group, Drop | None]:
    """The group's valid attempts; and why another was taken out, if any was."""
    drop, kept = None, []
    for rows in members(group).values():
      reasons = (
        (name, made.invalid(rows))
        for name, made in self._named
        if hasattr(made, 'invalid')
      )
      found = next((Drop(*reason) for reason in reasons if reason[1]), None)
      kept += [] if found else rows
      drop = found or drop
    return kept, drop


def make_filter(
  spec: str,
  config: Any = None,
  env_manager_config: Any = None,
  mode: str = 'train',
  *,
  group_size: int | None = None,
) -> Filters | None:
  """The filters that `spec` names, as the queue takes them; None when there are none.

  spec: '' for none, a call string such as `reward_std(threshold=.1)`, or
  `package.module:Class` with or without options; several are joined by ` + `.
  group_size: sampled attempts a group has, if known. Raises ConfigError for unknown
  names and options, and for filters that drop every group of this size.
  """
  calls = signature.parse_calls(spec)
  if not calls or mode != 'train':
    return None
  named = []
  for name, options in calls:
    if name not in FILTERS and ':' not in name:
      raise signature.unknown(name, FILTERS, 'group filter', 'group_filter')
    made = FILTERS.get(name) or signature.resolve(name)
    signature.check_options(made, options, f'group filter {name!r}')
    least = getattr(made, 'least_members', 1)
    if group_size is not None and group_size < least:
      raise signature.ConfigError(
        f'group filter {name!r} drops every group of {group_size}: set '
        f'--config.algorithm.group_size to at least {least}, or leave the filter out'
      )
    named.append((name, made(config, env_manager_config, mode, **options)))
  return Filters(named)
