"""Group filters: which groups are not worth training on.

A filter is made as `Filter(config, env_manager_config, mode)`, with options of its own
by keyword, and asked `filter(group_id, episode_id, group)`; True drops the group,
and another is played in its place. Validation never filters.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from jaxrl import signature
from jaxrl.types import Group


class GroupFilter(Protocol):
  """What a user's class must be."""

  def filter(self, group_id: int, episode_id: int, group: Group) -> bool: ...


def scores(group: Group) -> np.ndarray:
  """`[members]` float64: each attempt's return, over all of its rows."""
  totals: dict[int, float] = {}
  for row in group:
    totals[row.member] = totals.get(row.member, 0.0) + row.score
  return np.array(list(totals.values()))


class RewardStd:
  """Drops groups whose scores hardly differ: they teach a group baseline nothing.

  min_std: groups with a standard deviation of at most this are dropped.
  """

  def __init__(
    self,
    config: Any = None,
    env_manager_config: Any = None,
    mode: str = 'train',
    *,
    min_std: float = 1e-6,
  ):
    self._min_std = min_std

  def filter(self, group_id: int, episode_id: int, group: Group) -> bool:
    return bool(scores(group).std() <= self._min_std)


class ScoreRange:
  """Keeps groups whose mean score lies within [low, high]."""

  def __init__(
    self,
    config: Any = None,
    env_manager_config: Any = None,
    mode: str = 'train',
    *,
    low: float = 0.0,
    high: float = 1.0,
  ):
    self._low, self._high = low, high

  def filter(self, group_id: int, episode_id: int, group: Group) -> bool:
    return not self._low <= float(scores(group).mean()) <= self._high


FILTERS: dict[str, type] = {'reward_std': RewardStd, 'score_range': ScoreRange}


def make_filter(
  spec: str, config: Any = None, env_manager_config: Any = None, mode: str = 'train'
) -> Callable[[int, int, Group], bool] | None:
  """The filter that `spec` names, as the queue takes it; None when there is none.

  spec: '' for no filter, a call string such as `reward_std(min_std=.1)`, or
  `package.module:Class` with or without options.
  """
  if not spec or mode != 'train':
    return None
  name, options = signature.parse_call(spec)
  if name not in FILTERS and ':' not in name:
    raise signature.unknown(name, FILTERS, 'group filter', 'group_filter')
  made = FILTERS.get(name) or signature.resolve(name)
  signature.check_options(made, options, f'group filter {name!r}')
  return made(config, env_manager_config, mode, **options).filter
