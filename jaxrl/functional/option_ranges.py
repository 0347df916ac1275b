"""Ranges of the numeric options of components and algorithms.

An option means the same wherever it occurs in this package, so its range is written
once, by name. The range of an option that means something else in one component stands
under 'component.option'.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class Range(NamedTuple):
  """An interval of numbers.

  Attributes:
    low: The lowest number.
    high: The highest number.
    excludes_low: Whether `low` itself is left out.
  """

  low: float
  high: float = math.inf
  excludes_low: bool = False

  def __contains__(self, value: Any) -> bool:
    if self.excludes_low and value == self.low:
      return False
    return self.low <= value <= self.high

  def __str__(self) -> str:
    if self.high < math.inf:
      return f'must be in {"(" if self.excludes_low else "["}{self.low}, {self.high}]'
    return f'must be {"above" if self.excludes_low else "at least"} {self.low}'


SHARE = Range(0, 1)
NOT_NEGATIVE = Range(0)
POSITIVE = Range(0, excludes_low=True)
COUNT = Range(1)

OPTION_RANGES: dict[str, Range] = {
  'advantage_clip': POSITIVE,
  'beta': POSITIVE,  # of preference losses
  'jsd.beta': SHARE,
  'cap': POSITIVE,
  'clip': NOT_NEGATIVE,
  'clip_high': NOT_NEGATIVE,
  'clip_low': NOT_NEGATIVE,
  'critic_warmup': NOT_NEGATIVE,
  'decay_steps': NOT_NEGATIVE,
  'dual_clip': COUNT,
  'epsilon': NOT_NEGATIVE,
  'gamma': SHARE,
  'head': SHARE,
  'high': NOT_NEGATIVE,
  'horizon': POSITIVE,
  'label_smoothing': SHARE,
  'lam': SHARE,
  'low': NOT_NEGATIVE,
  'max_difference': NOT_NEGATIVE,
  'max_frac': SHARE,
  'mix.mu': SHARE,
  'overlong_cache': NOT_NEGATIVE,
  'overlong_length': COUNT,
  'peak': SHARE,
  'rank_penalty': SHARE,
  'ratio_high': NOT_NEGATIVE,
  'ratio_low': NOT_NEGATIVE,
  'reward_clip': POSITIVE,
  'ring_high': NOT_NEGATIVE,
  'ring_low': NOT_NEGATIVE,
  'sequence_mask': NOT_NEGATIVE,
  'skew': SHARE,
  'std_threshold': NOT_NEGATIVE,
  'target': POSITIVE,
  'tau': POSITIVE,
  'tau_negative': POSITIVE,
  'tau_positive': POSITIVE,
  'temperature': POSITIVE,
  'm2po.threshold': POSITIVE,
  'top_k': COUNT,
  'valley': SHARE,
  'value_clip': NOT_NEGATIVE,
  'warmup_steps': NOT_NEGATIVE,
  'window': COUNT,
}


def find_out_of_range(
  component: str, options: Mapping[str, Any]
) -> tuple[str, Range] | None:
  """Returns the first option that is out of range, and its range; None if all fit.

  Args:
    component: The name of the component or algorithm.
    options: Its options; None and what is no number fits.
  """
  for name, value in options.items():
    allowed = OPTION_RANGES.get(f'{component}.{name}') or OPTION_RANGES.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if allowed is not None and is_number and value not in allowed:
      return name, allowed
  return None
