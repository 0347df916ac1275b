"""Reward shaping changes the rewards of a finished group and the weights of its rows.

A shaper is a function `shape(group, *, options) -> group` of a whole group. It returns
the rows, with changed copies in place of those it changes. Shapers run one after the
other, once, after the group has passed the filters, whether the rows are then sampled
or stored. A sample's score before shaping stays in `metrics['unshaped_score']`.

Rows of weight 0 do not push the policy, but they count in their group's baseline and in
the denominators of the loss like any other row.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl.component_table import Component, ComponentTable, as_calls, component_name
from jaxrl.functional import shaping
from jaxrl.group_stats import (
  RAW_SCORE,
  SampleRows,
  is_truncated,
  response_length,
  rows_by_sample,
  sample_accuracies,
  sample_score,
  sample_scores,
  without_greedy,
)
from jaxrl.options import (
  AT_LEAST_ONE,
  NOT_NEGATIVE,
  NOT_ZERO,
  SHARE,
  OptionValues,
  defaults,
  option_ranges,
  unknown_name_error,
)
from jaxrl.rollout.queue.group_pipeline import RewardShaperFn, try_group_function
from jaxrl.types import Group, Trajectory

SHAPING_STATISTICS: dict[str, Callable[[np.ndarray], Any]] = {
  'mean': np.mean,
  'std': lambda x: np.std(x, ddof=1) if len(x) > 1 and x.max() > x.min() else 0.0,
  'max': np.max,
  'min': np.min,
  'median': np.median,
}
METRIC_PREFIX = 'metrics.'  # marks an operand that is a metric of the sample


@option_ranges(max_length=AT_LEAST_ONE, cache=NOT_NEGATIVE, scale=NOT_NEGATIVE)
def overlong(
  group: Group,
  *,
  max_length: int | None = None,
  cache: float = 0.2,
  scale: float = 1.0,
) -> Group:
  """Adds DAPO's soft penalty on long responses; see `functional.shaping`.

  Args:
    group: The rows of all samples.
    max_length: Tokens a sample may write; the penalty is −scale at and beyond it. None
      is the run's own limit.
    cache: Tokens before `max_length` over which the penalty grows. A value below 1 is a
      share of `max_length`; the paper uses 0.2.
    scale: Multiplies the penalty.

  Returns:
    The group with changed rewards.

  Raises:
    ValueError: If `max_length` is None.
  """
  if max_length is None:
    raise ValueError('set max_length, which is not known here')
  cache_tokens = cache * max_length if 0 < cache < 1 else cache

  def penalty(rows: SampleRows) -> float:
    lengths = np.array([response_length(rows)])
    penalties = shaping.overlong_penalty(
      lengths, max_length=max_length, cache=cache_tokens
    )
    return scale * float(penalties[0])

  return _add_to_scores(group, penalty)


def mask_truncated(group: Group) -> Group:
  """Sets weight 0 for samples that were cut short by a limit on tokens or turns.

  They still count in the baseline: a response that was not finished was worth nothing.

  Args:
    group: The rows of all samples.

  Returns:
    The group with changed weights.
  """
  return _multiply_weights(group, lambda rows: 0.0 if is_truncated(rows) else 1.0)


@option_ranges(divide=NOT_ZERO)
def reward(
  group: Group,
  *,
  add: float | str = 0.0,
  subtract: float | str = 0.0,
  multiply: float | str = 1.0,
  divide: float | str = 1.0,
) -> Group:
  """Computes score ← ((score + add − subtract) · multiply) / divide.

  Each operand is a number, a statistic of the group's scores (mean, std, max, min or
  median), or `metrics.NAME`, a metric of the sample. std is that of the sample, and 0
  where all scores are equal; dividing by 0 divides by 1. Rewards of single turns are
  scaled, and what is added goes to the last one.

  Args:
    group: The rows of all samples.
    add: What is added first.
    subtract: What is subtracted first.
    multiply: The factor.
    divide: The divisor.

  Returns:
    The group with changed rewards.

  Raises:
    ValueError: For an unknown operand.
  """
  scores = sample_scores(group)
  operands = {'add': add, 'subtract': subtract, 'multiply': multiply, 'divide': divide}
  shaped = []
  for rows in rows_by_sample(group).values():
    values = {
      name: _operand(operand, scores, rows) for name, operand in operands.items()
    }
    factors = {name: values[name] for name in ('multiply', 'divide')}
    factor = float(shaping.rescale(np.ones(1), **factors)[0])
    new_score = float(shaping.rescale(np.array([sample_score(rows)]), **values)[0])
    scaled = [
      dataclasses.replace(row, rewards=row.rewards * np.float32(factor)) for row in rows
    ]
    shaped += _add_to_last_reward(scaled, new_score - factor * sample_score(rows))
  return shaped


@option_ranges(ascending=('low', 'high'))
def clip(group: Group, *, low: float = -1.0, high: float = 1.0) -> Group:
  """Clips scores to [low, high]; the difference goes to the last reward.

  Args:
    group: The rows of all samples.
    low: Lower bound of a score.
    high: Upper bound of a score.

  Returns:
    The group with changed rewards.
  """

  def difference(rows: SampleRows) -> float:
    return float(np.clip(sample_score(rows), low, high)) - sample_score(rows)

  return _add_to_scores(group, difference)


@option_ranges(low=SHARE, high=SHARE, ascending=('low', 'high'))
def difficulty_mask(
  group: Group, *, low: float = 0.1, high: float = 0.95, right: float = 1.0
) -> Group:
  """Sets weight 0 for a group whose share of right samples lies outside [low, high].

  Unlike the filter `pass_rate`, no other group is played instead.

  Args:
    group: The rows of all samples.
    low: Lower bound of the share of right samples.
    high: Upper bound of the share of right samples.
    right: A sample is right from this accuracy on, as in the filter `pass_rate`.

  Returns:
    The group with changed weights.
  """
  rate = _pass_rate(group, right)
  return _multiply_weights(group, lambda rows: float(low <= rate <= high))


@option_ranges(easy=NOT_NEGATIVE, hard=NOT_NEGATIVE)
def weigh_by_difficulty(
  group: Group, *, easy: float = 0.5, hard: float = 2.0, right: float = 1.0
) -> Group:
  """Weighs a group by its difficulty.

  Args:
    group: The rows of all samples.
    easy: Weight of a group whose samples are all right.
    hard: Weight of a group of which no sample is right.
    right: A sample is right from this accuracy on, as in the filter `pass_rate`.

  Returns:
    The group with changed weights.
  """
  rates = np.array([_pass_rate(group, right)])
  weight = float(shaping.difficulty_weights(rates, easy=easy, hard=hard)[0])
  return _multiply_weights(group, lambda rows: weight)


@option_ranges(shortest=NOT_NEGATIVE, longest=NOT_NEGATIVE)
def weigh_by_length(
  group: Group, *, shortest: float = 1.0, longest: float = 0.5
) -> Group:
  """Weighs samples by their length within the group, with a mean weight of 1.

  Args:
    group: The rows of all samples.
    shortest: Relative weight of the shortest sample.
    longest: Relative weight of the longest sample.

  Returns:
    The group with changed weights.
  """
  samples = rows_by_sample(without_greedy(group))
  lengths = np.array([response_length(rows) for rows in samples.values()], float)
  weights = shaping.length_weights(lengths, shortest=shortest, longest=longest)
  by_sample = dict(zip(samples, map(float, weights), strict=True))
  return _multiply_weights(group, lambda rows: by_sample.get(rows[0].sample_index, 1.0))


REWARD_SHAPERS: ComponentTable[Callable[..., Group]] = ComponentTable(
  'shaper',
  'reward_shaping',
  {
    'overlong': overlong,
    'mask_truncated': mask_truncated,
    'reward': reward,
    'clip': clip,
    'difficulty_mask': difficulty_mask,
    'difficulty_weights': weigh_by_difficulty,
    'length_weights': weigh_by_length,
  },
)


@dataclasses.dataclass(frozen=True)
class RewardShaper:
  """Applies several shapers one after the other.

  Attributes:
    shapers: The shapers, in order.
  """

  shapers: Sequence[RewardShaperFn]

  def __call__(self, group: Group) -> Group:
    """Returns the shaped group as new rows; the given group stays as it is."""
    group = _record_raw_scores(group)
    for shaper in self.shapers:
      group = shaper(group)
      _check_shaped(shaper, group)
    return group


def _check_shaped(shaper: RewardShaperFn, group: object) -> None:
  """Raises ValueError for what is not a group, such as the verdict of a filter."""
  is_group = isinstance(group, list) and all(isinstance(x, Trajectory) for x in group)
  if not is_group or not group:
    kind = 'None' if group is None else f'a {type(group).__name__}'
    kind = 'an empty list' if group == [] else kind
    name = component_name(shaper)
    raise ValueError(
      f'reward shaper {name!r} returns {kind}; it must return the group, a list of its '
      'rows with other rewards or weights'
    )


def make_reward_shaper(
  shapers: Sequence[Component] | Component, limits: OptionValues | None = None
) -> RewardShaper | None:
  """Creates the shapers of a run.

  Args:
    shapers: Calls, whose names may be `package.module:function`; names; or functions.
      Empty for none.
    limits: The run's own limits, such as `max_length`. A limit is passed to every
      shaper with an option of that name that is None.

  Returns:
    The shapers as `GroupQueue` takes them, or None if there are none.

  Raises:
    ValueError: For an unknown name or option, or for what is not a reward shaper.
  """
  bound = []
  for component in as_calls(shapers):
    name, function, options = REWARD_SHAPERS.find(component)
    if isinstance(function, type):
      raise ValueError(
        f'shaper {name!r}: {name} is a class; a reward shaper is a function of (group) '
        'that returns the changed group'
      )
    own = defaults(function)
    for option, limit in (limits or {}).items():
      if option in own and options.get(option, own[option]) is None:
        options[option] = limit
    shaper = functools.partial(function, **options)
    if name not in REWARD_SHAPERS:
      check = functools.partial(_check_shaped, shaper)
      try_group_function(shaper, f'reward shaper {name!r}', check)
    bound.append(shaper)
  return RewardShaper(bound) if bound else None


def _operand(value: float | str, scores: np.ndarray, rows: SampleRows) -> float:
  if not isinstance(value, str):
    return value
  if value in SHAPING_STATISTICS:
    return float(SHAPING_STATISTICS[value](scores))
  metrics = rows[-1].metrics
  if value.startswith(METRIC_PREFIX) and value.removeprefix(METRIC_PREFIX) in metrics:
    return metrics[value.removeprefix(METRIC_PREFIX)]
  names = [*SHAPING_STATISTICS, *(METRIC_PREFIX + name for name in metrics)]
  raise unknown_name_error(value, names, 'statistic', "shaper 'reward'")


def _pass_rate(group: Group, pass_accuracy: float) -> float:
  return float((sample_accuracies(group) >= pass_accuracy).mean())


def _record_raw_scores(group: Group) -> Group:
  """Puts each sample's score into its rows' metrics, unless it is there already."""
  return [
    dataclasses.replace(row, metrics={RAW_SCORE: sample_score(rows), **row.metrics})
    for rows in rows_by_sample(group).values()
    for row in rows
  ]


def _add_to_scores(group: Group, amount: Callable[[SampleRows], float]) -> Group:
  """Adds `amount(rows)` to each sample's score."""
  samples = rows_by_sample(group).values()
  return [row for rows in samples for row in _add_to_last_reward(rows, amount(rows))]


def _add_to_last_reward(rows: SampleRows, amount: float) -> SampleRows:
  """Adds to a sample's last reward: on its last action token, if it has one."""
  *previous_rows, last = rows
  if amount == 0 or not len(last.rewards):
    return rows
  action_positions = np.flatnonzero(last.action_mask)
  rewards = last.rewards.copy()
  rewards[action_positions[-1] if len(action_positions) else -1] += amount
  return [*previous_rows, dataclasses.replace(last, rewards=rewards)]


def _multiply_weights(group: Group, factor: Callable[[SampleRows], float]) -> Group:
  """Multiplies the weights of each sample's rows by `factor(rows)`."""
  return [
    dataclasses.replace(row, weight=row.weight * factor(rows))
    for rows in rows_by_sample(group).values()
    for row in rows
  ]
