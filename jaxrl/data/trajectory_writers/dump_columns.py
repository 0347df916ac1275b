"""DumpColumns names and types the columns that a dump holds of each trajectory."""

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxrl.options import unknown_name_error

if TYPE_CHECKING:  # so that a wrong command line fails before JAX is imported
  from jaxrl.data.images import Image
  from jaxrl.types import Group, Trajectory

log = logging.getLogger(__name__)

# What every dump can hold. save_content is the whole trajectory as JSON, messages
# first, which `trajectory_codec.from_json` reads. step is the training step, turn the
# turn for environments with one row per turn. episode_score is the return of the whole
# episode.
STANDARD_COLUMNS = {
  'trajectory_id': 'string',
  'task_idx': 'bigint',
  'model_name': 'string',
  'save_content': 'string',
  'step': 'bigint',
  'turn': 'bigint',
  'stop_reason': 'string',
  'mode': 'string',
  'episode_score': 'double',
}
INTEGER_BITS = {'tinyint': 8, 'smallint': 16, 'int': 32, 'bigint': 64}
COLUMN_TYPES = (*INTEGER_BITS, 'double', 'float', 'boolean', 'string')
DumpRow = dict[str, Any]  # column → value


class DumpColumns:
  """The columns of a dump, in order.

  Types are those of MaxCompute: tinyint, smallint, int, bigint, float, double, boolean,
  string.

  Args:
    asked: Pairs of a name and a type, such as `[['task_idx', 'bigint'], …]`; empty
      selects all columns.
    own: The environments' columns, as a mapping of name to type; '' leaves the type to
      `asked`, or string.
    where: The config key of `asked`, for error messages.
    save_arrays: Whether save_content has the arrays of tokens. Without them, no
      trajectory can be restored from it.

  Attributes:
    types: The type of each column, by name.
    write_images: Stores the images that rows name, as `FileWriter.write_images`; None
      if they cannot be stored.
    formats: How the run's model writes tool calls and thoughts, as the names of
      `tool_format` and `thought_format`; rows have them in their extras.

  Raises:
    ValueError: If a column or type is unknown, a standard column has a type that
      cannot hold it, a name occurs twice, or `asked` is malformed.
  """

  def __init__(
    self,
    columns: Iterable[object] = (),
    env_columns: Mapping[str, str] | None = None,
    where: str = 'trajectory_dump.columns',
    *,
    save_arrays: bool = True,
  ):
    env_columns = dict(env_columns or {})
    for name in sorted(env_columns.keys() & STANDARD_COLUMNS.keys()):
      raise ValueError(f'an environment cannot have a column {name!r}: it is standard')
    known = {**STANDARD_COLUMNS, **env_columns}
    self.types: dict[str, str] = {}
    for pair in columns:
      name, kind = _pair(pair, where)
      if name not in known:
        raise unknown_name_error(name, known, 'column', where)
      if name in self.types:
        raise ValueError(f'{where}: column {name!r} is there twice')
      if not _holds(kind, known[name]):
        raise ValueError(
          f'{where}: column {name!r} is a {known[name]}, which a {kind} cannot hold'
        )
      self.types[name] = kind
    if not self.types:
      self.types = {n: kind or 'string' for n, kind in known.items()}
      for name, kind in self.types.items():
        _pair((name, kind), f'column {name!r}')
    self._known = known.keys()
    self._undeclared = {n for n in self.types if env_columns.get(n, 'known') == ''}
    self._save_arrays = save_arrays
    self.write_images: Callable[[Mapping[str, Image]], None] | None = None
    self.formats: dict[str, str] = {}
    self._warned: set[str] = set()

  def rows(
    self,
    group: 'Group',
    task_idx: int | None = None,
    *,
    step: int | None = None,
    **facts: str,
  ) -> list[DumpRow]:
    """Builds one row for each trajectory of a group.

    Args:
      group: The trajectories of a task.
      task_idx: The task's number. By default the dataset row that it was, or its number
        within its tag.
      step: The training step in which the group was played; None outside training. An
        evaluation plays the same tasks at several steps, so ids begin with it.
      **facts: Columns that trajectories do not know: model_name and mode.

    Returns:
      The rows, as mappings of column to value.
    """
    scores: dict[int, float] = {}
    for row in group:
      scores[row.sample_index] = scores.get(row.sample_index, 0.0) + row.score
    if 'save_content' in self.types:
      self._store_images(group)
    return [
      self._row(row, task_idx, step, scores[row.sample_index], facts) for row in group
    ]

  def _row(
    self,
    row: 'Trajectory',
    task_idx: int | None,
    step: int | None,
    score: float,
    facts: Mapping[str, str],
  ) -> DumpRow:
    if task_idx is None:
      task_idx = row.columns.get('task_idx', row.env_group + row.episode_id)
    played = [facts['mode'], str(step)] if step is not None else []
    values = {
      **facts,
      'trajectory_id': '_'.join([*played, row.trajectory_id]),
      'task_idx': task_idx,
      'step': step,
      'turn': row.turn,
      'stop_reason': row.stop_reason,
      'episode_score': score,
      **row.columns,  # what the environment or its manager sets holds
    }
    if 'save_content' in self.types and 'save_content' not in row.columns:
      values['save_content'] = self._content(row)
    for name in values.keys() - self._known:
      self._warn(
        name,
        'no dump has it: declare it in `columns` of the environment or manager, as '
        "{'name': 'string'}, or ask for it in trajectory_dump.columns",
      )
    for name in self._undeclared - values.keys():
      self._warn(name, 'no row sets it; null is written')
    return {name: self._fit(name, values.get(name)) for name in self.types}

  def _store_images(self, group: 'Group') -> None:
    """Stores the images of a group, which its rows name by their digests."""
    from jaxrl.data import trajectory_codec

    images = trajectory_codec.images_of(group)
    if images and self.write_images is not None:
      self.write_images(images)
    elif images:
      self._warn('save_content', 'images are not stored here, only their digests')

  def _content(self, row: 'Trajectory') -> str:
    from jaxrl.data import trajectory_codec

    data = {}
    if self.formats:
      row = dataclasses.replace(row, extras={**self.formats, **row.extras})
    try:
      data = trajectory_codec.to_json(row, arrays=self._save_arrays)
    except TypeError as error:  # drop only the environment's values, not the row
      self._warn('save_content', f'{error}; such values are left out')
      without_values = dataclasses.replace(
        row, columns={}, extras={'error': str(error)}
      )
      data = trajectory_codec.to_json(without_values, arrays=self._save_arrays)
    return json.dumps(data, allow_nan=False, separators=(',', ':'))

  def _fit(self, name: str, value: object) -> Any:
    """Converts a value to its column's type; one that does not fit becomes None."""
    if value is None:
      return None
    kind = self.types[name]
    try:
      return _READERS[kind](value)
    except (TypeError, ValueError) as error:
      self._warn(name, f'{error}; null is written in its place')
      return None

  def _warn(self, name: str, text: str) -> None:
    if name not in self._warned:
      self._warned.add(name)
      log.warning('column %s: %s (reported once)', name, text)


def _pair(pair: object, where: str) -> tuple[str, str]:
  if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
    raise ValueError(
      f'{where}: {pair!r} is not a pair of name and type; write '
      "[['task_idx', 'bigint'], ['save_content', 'string']]"
    )
  name, kind = map(str, pair)
  kind = kind.lower()
  if kind not in COLUMN_TYPES:
    raise unknown_name_error(kind, COLUMN_TYPES, 'type', f'{where}: column {name!r}')
  return name, kind


def _holds(column_type: str, value_type: str) -> bool:
  """Returns whether values of a type fit columns of another; '' fits any."""
  numbers = ('float', 'double')
  return (
    value_type in ('', column_type)
    or (
      value_type in INTEGER_BITS
      and column_type in INTEGER_BITS
      and INTEGER_BITS[column_type] >= INTEGER_BITS[value_type]
    )
    or (value_type in numbers and column_type in numbers)
    or (value_type in INTEGER_BITS and column_type == 'double')
  )


def _integer_reader(kind: str) -> Callable[[Any], int]:
  limit = 2 ** (INTEGER_BITS[kind] - 1)

  def read(value: object) -> int:
    value = _item(value)
    if isinstance(value, bool) or not isinstance(value, int):
      raise TypeError(f'{value!r} is not a whole number')
    if not -limit <= value < limit:
      raise ValueError(f'{value} does not fit a {kind}')
    return value

  return read


def _number(value: object) -> float:
  value = _item(value)
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise TypeError(f'{value!r} is not a number')
  if not math.isfinite(value):
    raise ValueError(f'{value} is not finite')
  return float(value)


def _truth(value: object) -> bool:
  value = _item(value)
  if not isinstance(value, bool):
    raise TypeError(f'{value!r} is not true or false')
  return value


def _text(value: object) -> str:
  if isinstance(value, Mapping | list | tuple):
    return json.dumps(value, allow_nan=False, separators=(',', ':'))
  if not isinstance(value, str):
    raise TypeError(f'{value!r} is not a text')
  return value.encode('utf-8', 'backslashreplace').decode()  # halves of pairs


def _item(value: Any) -> Any:
  """Converts numpy scalars to Python's."""
  return value.item() if getattr(value, 'shape', None) == () else value


_READERS: dict[str, Callable[[Any], Any]] = {
  **{kind: _integer_reader(kind) for kind in INTEGER_BITS},
  'float': _number,
  'double': _number,
  'boolean': _truth,
  'string': _text,
}
