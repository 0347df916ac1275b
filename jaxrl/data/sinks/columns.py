"""Named and typed columns: what a dump holds of each trajectory."""

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxrl.signature import ConfigError, unknown

if TYPE_CHECKING:  # a wrong command line is answered before JAX is imported
  from jaxrl.types import Group, Trajectory

log = logging.getLogger(__name__)

# What every dump can hold. save_content is the whole trajectory as JSON, which
# `trajectories.from_json` reads; step the turn, for environments played as single
# steps; episode_score the return of the whole episode.
STANDARD = {
  'trajectory_id': 'string',
  'task_idx': 'bigint',
  'model_name': 'string',
  'save_content': 'string',
  'step': 'bigint',
  'stop_reason': 'string',
  'mode': 'string',
  'episode_score': 'double',
}
BITS = {'tinyint': 8, 'smallint': 16, 'int': 32, 'bigint': 64}
TYPES = (*BITS, 'double', 'float', 'boolean', 'string')
Row = dict[str, Any]  # column → value


class Columns:
  """The columns of a dump, in order.

  asked: pairs of a name and a type, `[['task_idx', 'bigint'], …]`; none: all there
  are. own: the environments' columns, name → type; '' where the type is for `asked`
  to say, and string where it does not. Types are MaxCompute's: tinyint, smallint, int,
  bigint, float, double, boolean, string.

  Raises ConfigError for an unknown column or type, a standard column with a type that
  cannot hold it, a name given twice, and what is not pairs.
  """

  def __init__(
    self,
    asked: Iterable[Any] = (),
    own: Mapping[str, str] | None = None,
    where: str = '--config.dump.columns',
  ):
    own = dict(own or {})
    for name in sorted(own.keys() & STANDARD.keys()):
      raise ConfigError(f'an environment cannot have a column {name!r}: it is standard')
    known = {**STANDARD, **own}
    self.types: dict[str, str] = {}
    for pair in asked:
      name, kind = _pair(pair, where)
      if name not in known:
        raise unknown(name, known, 'column', where)
      if name in self.types:
        raise ConfigError(f'{where}: column {name!r} is there twice')
      if not _holds(kind, known[name]):
        raise ConfigError(
          f'{where}: column {name!r} is a {known[name]}, which a {kind} cannot hold'
        )
      self.types[name] = kind
    if not self.types:
      self.types = {n: kind or 'string' for n, kind in known.items()}
      for name, kind in self.types.items():
        _pair((name, kind), f'column {name!r}')
    self._warned: set[str] = set()

  def rows(
    self, group: 'Group', task_idx: int | None = None, **facts: str
  ) -> list[Row]:
    """A row for each trajectory of a task's attempts.

    task_idx: the task's number; by default the row of the data set that it was, or
    the how many-th of its tag. facts: the columns that trajectories do not know,
    model_name and mode.
    """
    scores: dict[int, float] = {}
    for row in group:
      scores[row.member] = scores.get(row.member, 0.0) + row.score
    return [self._row(row, task_idx, scores[row.member], facts) for row in group]

  def _row(
    self,
    row: 'Trajectory',
    task_idx: int | None,
    score: float,
    facts: Mapping[str, str],
  ) -> Row:
    if task_idx is None:
      task_idx = row.columns.get('task_idx', row.group_id + row.episode_id)
    values = {
      **row.columns,
      **facts,
      'trajectory_id': row.trajectory_id,
      'task_idx': task_idx,
      'step': row.step,
      'stop_reason': row.stop_reason,
      'episode_score': score,
    }
    if 'save_content' in self.types:
      values['save_content'] = self._content(row)
    return {name: self._fit(name, values.get(name)) for name in self.types}

  def _content(self, row: 'Trajectory') -> str:
    from jaxrl.data import trajectories

    data = {}
    try:
      data = trajectories.to_json(row)
    except TypeError as error:  # an environment's values: they cost no more than that
      self._warn('save_content', f'{error}; left out with its like')
      bare = dataclasses.replace(row, columns={}, extras={'error': str(error)})
      data = trajectories.to_json(bare)
    return json.dumps(data, allow_nan=False, separators=(',', ':'))

  def _fit(self, name: str, value: Any) -> Any:
    """The value as its column's type; None, and a warning, where it does not fit."""
    if value is None:
      return None
    kind = self.types[name]
    try:
      return _READ[kind](value)
    except (TypeError, ValueError) as error:
      self._warn(name, f'{error}; null is written in its place')
      return None

  def _warn(self, name: str, text: str) -> None:
    if name not in self._warned:
      self._warned.add(name)
      log.warning('column %s: %s (said once)', name, text)


def _pair(pair: Any, where: str) -> tuple[str, str]:
  if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
    raise ConfigError(
      f'{where}: {pair!r} is not a pair of name and type; write '
      "[['task_idx', 'bigint'], ['save_content', 'string']]"
    )
  name, kind = map(str, pair)
  kind = kind.lower()
  if kind not in TYPES:
    raise unknown(kind, TYPES, 'type', f'{where}: column {name!r}')
  return name, kind


def _holds(kind: str, own: str) -> bool:
  """Whether values of type `own` fit columns of type `kind`; '' fits any."""
  numbers = ('float', 'double')
  return (
    own in ('', kind)
    or (own in BITS and kind in BITS and BITS[kind] >= BITS[own])
    or (own in numbers and kind in numbers)
    or (own in BITS and kind == 'double')
  )


def _whole(kind: str) -> Callable[[Any], int]:
  limit = 2 ** (BITS[kind] - 1)

  def read(value: Any) -> int:
    value = _item(value)
    if isinstance(value, bool) or not isinstance(value, int):
      raise TypeError(f'{value!r} is not a whole number')
    if not -limit <= value < limit:
      raise ValueError(f'{value} does not fit a {kind}')
    return value

  return read


def _number(value: Any) -> float:
  value = _item(value)
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise TypeError(f'{value!r} is not a number')
  if not math.isfinite(value):
    raise ValueError(f'{value} is not finite')
  return float(value)


def _truth(value: Any) -> bool:
  value = _item(value)
  if not isinstance(value, bool):
    raise TypeError(f'{value!r} is not true or false')
  return value


def _text(value: Any) -> str:
  if not isinstance(value, str):
    raise TypeError(f'{value!r} is not a text')
  return value.encode('utf-8', 'backslashreplace').decode()  # halves of pairs


def _item(value: Any) -> Any:
  """numpy's scalars as Python's."""
  return value.item() if getattr(value, 'shape', None) == () else value


_READ: dict[str, Callable[[Any], Any]] = {
  **{kind: _whole(kind) for kind in BITS},
  'float': _number,
  'double': _number,
  'boolean': _truth,
  'string': _text,
}
