"""Group filters decide which groups, and which samples of a group, are trained on.

A filter is created as `Filter(config, env_manager_config, mode, **options)` and asked
`filter(group_id, episode_id, group)`. True or a `DropReason` drops the group, and
another group is played in its place. A filter with a method `invalid(rows)` is asked
about each sample first: a sample for which it returns a reason leaves the group, and
the group is dropped if too few samples are left. A plain function
`drop(group, **options)` is a filter too.

Validation never filters. Filters do not see greedy samples, and the rewards they see
are those of the environment, before any reward shaping.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from jaxrl.component_table import Component, ComponentTable, as_calls
from jaxrl.group_stats import (
  SampleRows,
  rows_by_sample,
  sample_accuracies,
  sample_score,
  sample_scores,
  without_greedy,
)
from jaxrl.options import NOT_NEGATIVE, SHARE, option_ranges
from jaxrl.rollout.queue.group_pipeline import DropReason, try_group_function
from jaxrl.types import Group

FILTER_STATISTICS = {'mean': np.mean, 'max': np.max, 'min': np.min}
TOO_EASY = 'the tasks are too easy: use harder ones, or filter fewer groups'
TOO_HARD = (
  'the tasks are too hard: use easier ones, a better initial model (config.sft), or '
  'more samples per group (algorithm.group_size)'
)


class GroupFilter(Protocol):
  """Describes what a group filter, built-in or a user's, must provide."""

  def filter(self, group_id: int, episode_id: int, group: Group) -> bool | DropReason:
    """Decides whether a group is dropped.

    Args:
      group_id: The env group.
      episode_id: Its episode.
      group: The rows of all samples, without the greedy one.

    Returns:
      False to keep the group; True, or the reason, to drop it.
    """
    ...


class _BuiltinFilter:
  """Accepts the arguments that every filter is created with.

  Attributes:
    min_samples: The filter drops every group with fewer samples than this.
  """

  min_samples = 1

  def __init__(
    self, config: Any = None, env_manager_config: Any = None, mode: str = 'train'
  ):
    del config, env_manager_config, mode


@option_ranges(threshold=NOT_NEGATIVE)
class RewardStdFilter(_BuiltinFilter):
  """Drops groups whose scores hardly differ: they teach a group baseline nothing."""

  min_samples = 2

  def __init__(self, *args: Any, threshold: float = 1e-6):
    """Creates the filter.

    Args:
      *args: What every filter is created with.
      threshold: Groups whose scores have at most this population standard deviation
        are dropped.
    """
    super().__init__(*args)
    self._threshold = threshold

  def filter(self, group_id: int, episode_id: int, group: Group) -> bool | DropReason:
    """Drops the group if the standard deviation of its scores is too small."""
    scores = sample_scores(group)
    # Equal floats can have a standard deviation above 0, so equality is tested first.
    std = 0.0 if scores.max() == scores.min() else float(scores.std())
    if std > self._threshold:
      return False
    mean = scores.mean()
    reason = (
      f'its scores have mean {mean:.3g} and standard deviation {std:.3g}, '
      f'threshold={self._threshold}'
    )
    return DropReason('reward_std', reason, TOO_HARD if mean <= 0 else TOO_EASY)


@option_ranges(ascending=('low', 'high'))
class ScoreRangeFilter(_BuiltinFilter):
  """Keeps groups whose mean, max or min score lies within [low, high]."""

  def __init__(
    self,
    *args: Any,
    low: float = 0.0,
    high: float = 1.0,
    of: Literal['mean', 'max', 'min'] = 'mean',
  ):
    """Creates the filter.

    Args:
      *args: What every filter is created with.
      low: Lower bound of the statistic.
      high: Upper bound of the statistic.
      of: The statistic of the group's scores.
    """
    super().__init__(*args)
    self._low, self._high = low, high
    self._statistic = of

  def filter(self, group_id: int, episode_id: int, group: Group) -> bool | DropReason:
    """Drops the group if the statistic of its scores is out of bounds."""
    value = float(FILTER_STATISTICS[self._statistic](sample_scores(group)))
    if self._low <= value <= self._high:
      return False
    reason = (
      f'the {self._statistic} of its scores is {value:.3g}, outside '
      f'[{self._low}, {self._high}]'
    )
    hint = TOO_HARD if value < self._low else TOO_EASY
    return DropReason('score_range', reason, hint)


@option_ranges(low=SHARE, high=SHARE, ascending=('low', 'high'))
class PassRateFilter(_BuiltinFilter):
  """Keeps groups in which the share of right samples lies within [low, high]."""

  name = 'pass_rate'

  def __init__(
    self, *args: Any, low: float = 0.1, high: float = 0.9, right: float = 1.0
  ):
    """Creates the filter.

    Args:
      *args: What every filter is created with.
      low: Lower bound of the share of right samples.
      high: Upper bound of the share of right samples.
      right: A sample is right from this accuracy on. The accuracy is the environment's
        metric `accuracy`, or the return where it reports none.
    """
    super().__init__(*args)
    self._low, self._high = low, high
    self._pass_accuracy = right

  def filter(self, group_id: int, episode_id: int, group: Group) -> bool | DropReason:
    """Drops the group if its share of right samples is out of bounds."""
    is_right = sample_accuracies(group) >= self._pass_accuracy
    rate = float(is_right.mean())
    if self._keeps(rate):
      return False
    reason = (
      f'{is_right.sum()} of {len(is_right)} samples are right '
      f'(accuracy ≥ {self._pass_accuracy})'
    )
    hint = TOO_EASY if rate >= 0.5 else f'{TOO_HARD}, or a lower {self.name}(right=…)'
    return DropReason(self.name, reason, hint)

  def _keeps(self, rate: float) -> bool:
    return self._low <= rate <= self._high


class AccuracyFilter(PassRateFilter):
  """Drops groups that are all right or all wrong: DAPO's dynamic sampling.

  See arXiv 2503.14476. Penalties on length or format do not affect what is right.
  """

  name = 'accuracy'
  min_samples = 2

  def __init__(self, *args: Any, right: float = 1.0):
    """Creates the filter.

    Args:
      *args: What every filter is created with.
      right: A sample is right from this accuracy on, as in `pass_rate`.
    """
    super().__init__(*args, low=0.0, high=1.0, right=right)

  def _keeps(self, rate: float) -> bool:
    return 0 < rate < 1


@option_ranges(ascending=('low', 'high'))
class InvalidRewardFilter(_BuiltinFilter):
  """Removes samples whose score is not finite or is out of bounds."""

  def __init__(
    self, *args: Any, low: float = -float('inf'), high: float = float('inf')
  ):
    """Creates the filter.

    Args:
      *args: What every filter is created with.
      low: Lower bound of a valid score.
      high: Upper bound of a valid score.
    """
    super().__init__(*args)
    self._low, self._high = low, high

  def invalid(self, rows: SampleRows) -> str:
    """Returns why a sample must not be used, or '' if it may be.

    Args:
      rows: The rows of one sample.

    Returns:
      The reason, or ''.
    """
    score = sample_score(rows)
    if np.isfinite(score) and self._low <= score <= self._high:
      return ''
    return f'a score of {score:.3g} lies outside [{self._low}, {self._high}]'

  def filter(self, group_id: int, episode_id: int, group: Group) -> bool | DropReason:
    """Keeps every group."""
    return False


GROUP_FILTERS: ComponentTable[type] = ComponentTable(
  'group filter',
  'group_filter',
  {
    'reward_std': RewardStdFilter,
    'score_range': ScoreRangeFilter,
    'accuracy': AccuracyFilter,
    'pass_rate': PassRateFilter,
    'invalid_reward': InvalidRewardFilter,
  },
  base=GroupFilter,
)


class GroupFilterChain:
  """Applies several filters in turn; a group is dropped by the first that drops it."""

  def __init__(self, named_filters: Sequence[tuple[str, Any]]):
    """Creates a chain.

    Args:
      named_filters: (name, filter) of each filter.
    """
    self._named_filters = list(named_filters)

  def __call__(self, group_id: int, episode_id: int, group: Group) -> DropReason | None:
    """Decides whether a group is dropped.

    Args:
      group_id: The env group.
      episode_id: Its episode.
      group: The rows of all samples.

    Returns:
      Why the group is dropped, or None if it is kept.
    """
    for name, group_filter in self._named_filters:
      verdict = group_filter.filter(group_id, episode_id, without_greedy(group))
      if isinstance(verdict, DropReason):
        return verdict
      _check_verdict(name, verdict)
      if verdict:
        return DropReason(name, f'{name} drops it')
    return None

  def drop_invalid(self, group: Group) -> tuple[Group, DropReason | None]:
    """Removes invalid samples from a group.

    Args:
      group: The rows of all samples.

    Returns:
      The rows of the valid samples, and why the last invalid one was removed, if any.
    """
    last_drop: DropReason | None = None
    valid_rows: Group = []
    for rows in rows_by_sample(group).values():
      drop = self._find_invalid(rows)
      if drop is None:
        valid_rows += rows
      else:
        last_drop = drop
    return valid_rows, last_drop

  def _find_invalid(self, rows: SampleRows) -> DropReason | None:
    for name, group_filter in self._named_filters:
      if hasattr(group_filter, 'invalid') and (reason := group_filter.invalid(rows)):
        return DropReason(name, reason)
    return None


def _check_verdict(name: str, verdict: object) -> None:
  """Raises ValueError for what is not a verdict, such as the group of a shaper."""
  if not isinstance(verdict, bool | np.bool_ | DropReason):
    kind = 'None' if verdict is None else f'a {type(verdict).__name__}'
    raise ValueError(
      f'group filter {name!r} returns {kind}; it must return True to drop the group, '
      'False to keep it, or a DropReason'
    )


class _FunctionFilter:
  """Makes a filter of a function that decides whether a group is dropped."""

  def __init__(self, function: Callable[[Group], bool | DropReason]):
    self._function = function

  def filter(self, group_id: int, episode_id: int, group: Group) -> bool | DropReason:
    """Asks the function, see `GroupFilter.filter`."""
    del group_id, episode_id
    return self._function(group)


def make_group_filter(
  filters: Sequence[Component] | Component,
  config: Any = None,
  env_manager_config: Any = None,
  mode: str = 'train',
  *,
  group_size: int | None = None,
) -> GroupFilterChain | None:
  """Creates the filters of a run.

  Args:
    filters: Calls such as `ComponentCall('reward_std', {'threshold': 0.1})`, whose name
      may be `package.module:Name`; names; classes; or functions. Empty for none.
    config: The run's config, passed to each filter.
    env_manager_config: The tag's section of the config, passed to each filter.
    mode: 'train' or 'val'; passed to each filter. There are no filters except in
      training.
    group_size: Samples per group, if known.

  Returns:
    The filters as `GroupQueue` takes them, or None if there are none.

  Raises:
    ValueError: For an unknown name or option, for what is not a group filter, and for a
      filter that would drop every group of this size.
  """
  components = as_calls(filters)
  if not components or mode != 'train':
    return None
  named_filters = []
  for component in components:
    name, filter_class, options = GROUP_FILTERS.find(component)
    min_samples = getattr(filter_class, 'min_samples', 1)
    if group_size is not None and group_size < min_samples:
      raise ValueError(
        f'group filter {name!r} drops every group of {group_size}: set '
        f'algorithm.group_size to at least {min_samples}, or remove the filter'
      )
    if isinstance(filter_class, type):
      group_filter = filter_class(config, env_manager_config, mode, **options)
    else:
      function = functools.partial(filter_class, **options)
      if name not in GROUP_FILTERS:
        check = functools.partial(_check_verdict, name)
        try_group_function(function, f'group filter {name!r}', check)
      group_filter = _FunctionFilter(function)
    named_filters.append((name, group_filter))
  return GroupFilterChain(named_filters)
