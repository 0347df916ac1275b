"""ExperienceWriter stores each played group exactly once."""

import dataclasses
import json
import os
import pathlib
import uuid
from collections.abc import Sequence

import numpy as np

from jaxrl.data import trajectory_codec
from jaxrl.data.store.store_database import StoreDatabase, import_sqlalchemy
from jaxrl.options import OptionValues
from jaxrl.types import Group, Trajectory

MAX_GROUP_BYTES = 2**28  # of a group, compressed


class GroupSerializer:
  """Serializes whole groups; takes the place of a dump's columns.

  Args:
    version: The version of the weights that play, which the engine counts from 0.
  """

  def __init__(self, version: int = 0):
    self.types = {'group': 'whole'}
    self._version = version

  def rows(self, group: Group, number: int, **facts: str) -> list[bytes]:
    """Serializes a group.

    Args:
      group: The trajectories of a task.
      number: Ignored.
      **facts: Ignored.

    Returns:
      A list of one item, the group's bytes.

    Raises:
      TypeError: If a value cannot be serialized; the error names it.
      ValueError: If the group is too large.
    """
    data = trajectory_codec.to_bytes([[self._aged(row) for row in group]])
    if len(data) > MAX_GROUP_BYTES:
      raise ValueError(
        f'group {group[0].group_name} has {len(data):,} bytes, more than the '
        f'{MAX_GROUP_BYTES:,} that an experience store takes'
      )
    return [data]

  def _aged(self, row: Trajectory) -> Trajectory:
    versions = row.weights_version
    versions = np.where(versions < 0, versions, versions + self._version)
    return dataclasses.replace(row, weights_version=versions.astype(np.int32))


class ExperienceWriter:
  """Writes into a store, whose content also records what has been played.

  The methods are those of `dump_journal.DumpJournal`.

  Args:
    database: The store.
    run: The run that owns the groups; it writes each (tag, number) once.
    facts: What the run plays with, for readers to compare.
  """

  part_size = 1

  def __init__(self, database: StoreDatabase, run: str, facts: OptionValues):
    self._database = database
    self._run = run
    self._pending: dict[tuple[str, int], bytes] = {}
    sa, explorers = import_sqlalchemy(), database.tables.explorers
    text = json.dumps(dict(facts), sort_keys=True)
    is_this_run = explorers.c.run == run
    with database.write() as connection:
      if connection.execute(sa.select(explorers.c.run).where(is_this_run)).first():
        connection.execute(sa.update(explorers).where(is_this_run).values(facts=text))
      else:
        connection.execute(sa.insert(explorers).values(run=run, facts=text))

  def played_items(self, tag: str) -> set[int]:
    """Returns the numbers of a tag's groups that are in the store.

    Args:
      tag: The environment's tag.

    Returns:
      The numbers.
    """
    sa, groups = import_sqlalchemy(), self._database.tables.groups
    is_this_run = (groups.c.run == self._run) & (groups.c.tag == tag)
    with self._database.read() as connection:
      return set(
        connection.execute(sa.select(groups.c.number).where(is_this_run)).scalars()
      )

  def add(self, tag: str, number: int, rows: Sequence[bytes]) -> None:
    """Takes a group, which the next `flush` writes.

    Args:
      tag: The environment's tag.
      number: The number of the group within its tag.
      rows: The group as `GroupSerializer.rows` returned it.
    """
    (self._pending[tag, number],) = rows

  def flush(self, *, all_played: bool = False) -> int:
    """Writes all added groups, or none.

    Args:
      all_played: Ignored.

    Returns:
      The number of groups that were written.
    """
    sa, tables = import_sqlalchemy(), self._database.tables
    groups, pending = tables.groups, dict(self._pending)
    if not pending:
      return 0
    with self._database.write() as connection:
      for (tag, number), data in pending.items():
        key_columns = {'run': self._run, 'tag': tag, 'number': number}
        is_same = [groups.c[name] == value for name, value in key_columns.items()]
        if connection.execute(sa.select(groups.c.id).where(*is_same)).first():
          continue
        inserted = connection.execute(sa.insert(groups).values(**key_columns))
        payload = {'group_id': inserted.inserted_primary_key[0], 'data': data}
        connection.execute(sa.insert(tables.payloads).values(**payload))
    for key in pending:
      del self._pending[key]
    return len(pending)


def writer_run_id(folder: pathlib.Path) -> str:
  """Returns the id by which a store knows the run that lives in `folder`.

  Args:
    folder: The run's folder; the id is created there once.

  Returns:
    The id.
  """
  path = folder / 'explorer.txt'
  if not path.exists():
    partial = path.with_name('.explorer.txt')
    with partial.open('w') as file:
      file.write(f'{uuid.uuid4().hex}\n')
      file.flush()
      os.fsync(file.fileno())
    os.replace(partial, path)
  return path.read_text().strip()
