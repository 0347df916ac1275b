"""Shapers: what is done to a group's rewards, and to the weights of its rows.

A shaper is a function `shape(group, *, options) -> Group` of a whole group: it gives
back the rows, changed copies in the place of those it changes. They run one after the
other, once, when a group has passed the filters; whatever samples or stores it has it
shaped. What an attempt scored before stays in its rows' `metrics['unshaped_score']`.

Rows of weight 0 do not push the policy. They count in their group's baseline, and in
the denominators of the loss, as any other.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl import signature
from jaxrl.functional import shaping
from jaxrl.rollout.members import (
  UNSHAPED,
  Rows,
  accuracies,
  length,
  members,
  sampled,
  score,
  scores,
  truncated,
)
from jaxrl.signature import ConfigError
from jaxrl.types import Group, Trajectory

Shaper = Callable[[Group], Group]
STATISTICS: dict[str, Callable[[np.ndarray], Any]] = {
  'mean': np.mean,
  'std': lambda x: np.std(x, ddof=1) if len(x) > 1 and x.max() > x.min() else 0.0,
  'max': np.max,
  'min': np.min,
  'median': np.median,
}
OWN = 'metrics.'  # what an attempt itself reports, as an operand


def overlong(
  group: Group,
  *,
  max_length: int | None = None,
  cache: float = 0.2,
  scale: float = 1.0,
) -> Group:
  """Adds DAPO's soft penalty on long answers (see `functional.shaping`).

  max_length: tokens an attempt may write, −1 · scale at and beyond it; None is the
  run's own limit. cache: tokens before it over which the penalty grows; below 1 it is
  a share of max_length, 0.2 as in the paper.
  """
  if max_length is None:
    raise ConfigError('shaper overlong: max_length is not known here: give it')
  tokens = cache * max_length if 0 < cache < 1 else cache

  def add(rows: Rows) -> float:
    lengths = np.array([length(rows)])
    penalty = shaping.overlong_penalty(lengths, max_length=max_length, cache=tokens)
    return scale * float(penalty[0])

  return _add(group, add)


def mask_truncated(group: Group) -> Group:
  """Weight 0 for attempts cut short by the limits on tokens or turns.

  They count in the baseline: an answer that did not come was worth nothing.
  """
  return _weigh(group, lambda rows: 0.0 if truncated(rows) else 1.0)


def reward(
  group: Group,
  *,
  add: float | str = 0.0,
  subtract: float | str = 0.0,
  multiply: float | str = 1.0,
  divide: float | str = 1.0,
) -> Group:
  """Score ← ((score + add − subtract) · multiply) / divide.

  Each is a number, a statistic of the group's scores (mean, std, max, min, median;
  std of the sample, 0 where all are equal, and a divisor of 0 divides by 1), or
  `metrics.NAME`, what the attempt itself reports. Rewards of single turns are scaled;
  what is added goes to the last one.
  """
  found = scores(group)
  given = {'add': add, 'subtract': subtract, 'multiply': multiply, 'divide': divide}
  changed = []
  for rows in members(group).values():
    values = {name: _operand(value, found, rows) for name, value in given.items()}
    factors = {name: values[name] for name in ('multiply', 'divide')}
    factor = float(shaping.rescale(np.ones(1), **factors)[0])
    wanted = float(shaping.rescale(np.array([score(rows)]), **values)[0])
    scaled = [_with(row, rewards=row.rewards * np.float32(factor)) for row in rows]
    changed += _raise(scaled, wanted - factor * score(rows))
  return changed


def clip(group: Group, *, low: float = -1.0, high: float = 1.0) -> Group:
  """Clips scores to [low, high]; the difference goes to the last reward."""
  return _add(group, lambda rows: float(np.clip(score(rows), low, high)) - score(rows))


def difficulty_mask(
  group: Group, *, low: float = 0.1, high: float = 0.95, right: float = 1.0
) -> Group:
  """Weight 0 for all of a group of which a share outside [low, high] is right.

  Unlike the filter `pass_rate` it plays no other group instead. right: as there.
  """
  rate = _pass_rate(group, right)
  return _weigh(group, lambda rows: float(low <= rate <= high))


def difficulty_weights(
  group: Group, *, easy: float = 0.5, hard: float = 2.0, right: float = 1.0
) -> Group:
  """Weighs a group by its difficulty, from `easy`, all right, to `hard`, none right."""
  rates = np.array([_pass_rate(group, right)])
  weight = float(shaping.difficulty_weights(rates, easy=easy, hard=hard)[0])
  return _weigh(group, lambda rows: weight)


def length_weights(
  group: Group, *, shortest: float = 1.0, longest: float = 0.5
) -> Group:
  """Weighs attempts by length within their group, to a mean of 1."""
  attempts = members(sampled(group))
  tokens = np.array([length(rows) for rows in attempts.values()], float)
  weights = shaping.length_weights(tokens, shortest=shortest, longest=longest)
  by_member = dict(zip(attempts, map(float, weights), strict=True))
  return _weigh(group, lambda rows: by_member.get(rows[0].member, 1.0))


SHAPERS: dict[str, Callable[..., Group]] = {
  'overlong': overlong,
  'mask_truncated': mask_truncated,
  'reward': reward,
  'clip': clip,
  'difficulty_mask': difficulty_mask,
  'difficulty_weights': difficulty_weights,
  'length_weights': length_weights,
}


@dataclasses.dataclass(frozen=True)
class Shapers:
  """Several shapers, one after the other."""

  steps: Sequence[Shaper]

  def __call__(self, group: Group) -> Group:
    """The shaped group, of new rows; the one given stays as it is."""
    group = _remember_scores(group)
    for step in self.steps:
      group = step(group)
    return group


def make_shaper(spec: str, limits: Mapping[str, Any] | None = None) -> Shapers | None:
  """The shapers that `spec` names, as the queue takes them; None when there are none.

  spec: call strings or `package.module:function`, joined by ` + `. limits: the run's
  own, by name of the option that takes it where it is not given, as `max_length`.
  Raises ConfigError for unknown names and options.
  """
  steps = []
  for name, options in signature.parse_calls(spec):
    if name not in SHAPERS and ':' not in name:
      raise signature.unknown(name, SHAPERS, 'shaper', 'shapers')
    function = SHAPERS.get(name) or signature.resolve(name)
    signature.check_options(function, options, f'shaper {name!r}')
    own = signature.defaults(function)
    for option, limit in (limits or {}).items():
      if option in own and options.get(option, own[option]) is None:
        options[option] = limit
    steps.append(functools.partial(function, **options))
  return Shapers(steps) if steps else None


def _operand(value: float | str, found: np.ndarray, rows: Rows) -> float:
  if not isinstance(value, str):
    return value
  if value in STATISTICS:
    return float(STATISTICS[value](found))
  own = rows[-1].metrics
  if value.removeprefix(OWN) in own and value.startswith(OWN):
    return own[value.removeprefix(OWN)]
  names = [*STATISTICS, *(OWN + name for name in own)]
  raise signature.unknown(value, names, 'statistic', "shaper 'reward'")


def _pass_rate(group: Group, right: float) -> float:
  return float((accuracies(group) >= right).mean())


def _with(row: Trajectory, **changes: Any) -> Trajectory:
  return dataclasses.replace(row, **changes)


def _remember_scores(group: Group) -> Group:
  """The rows with what their attempt scored, unless they have it."""
  return [
    _with(row, metrics={UNSHAPED: score(rows), **row.metrics})
    for rows in members(group).values()
    for row in rows
  ]


def _add(group: Group, amount: Callable[[Rows], float]) -> Group:
  """Adds `amount(rows)` to each attempt's score."""
  attempts = members(group).values()
  return [row for rows in attempts for row in _raise(rows, amount(rows))]


def _raise(rows: Rows, amount: float) -> Rows:
  """Adds to an attempt's last reward: on its last action token, if it has one."""
  *before, last = rows
  if amount == 0 or not len(last.rewards):
    return rows
  written = np.flatnonzero(last.action_mask)
  rewards = last.rewards.copy()
  rewards[written[-1] if len(written) else -1] += amount
  return [*before, _with(last, rewards=rewards)]


def _weigh(group: Group, weight: Callable[[Rows], float]) -> Group:
  """Multiplies the weights of each attempt's rows by `weight(rows)`."""
  attempts = members(group).values()
  return [
    _with(row, weight=row.weight * weight(rows)) for rows in attempts for row in rows
  ]
