"""Explorers: each group that is played is in the store once."""

import dataclasses
import json
import os
import pathlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.data import trajectories
from jaxrl.data.store.database import Database, sqlalchemy
from jaxrl.types import Group, Trajectory

MAX_BYTES = 2**28  # of a group, compressed


class Whole:
  """In the place of a dump's columns: a group as it is.

  version: of the weights that play, and that the engine counts from 0.
  """

  def __init__(self, version: int = 0):
    self.types, self._version = {'group': 'whole'}, version

  def rows(self, group: Group, number: int, **facts: str) -> list[bytes]:
    """Raises TypeError naming a value that cannot be kept, ValueError for too large."""
    data = trajectories.to_bytes([[self._aged(row) for row in group]])
    if len(data) > MAX_BYTES:
      raise ValueError(
        f'group {group[0].group_name} has {len(data):,} bytes, more than the '
        f'{MAX_BYTES:,} that an experience store takes'
      )
    return [data]

  def _aged(self, row: Trajectory) -> Trajectory:
    versions = row.weights_version
    versions = np.where(versions < 0, versions, versions + self._version)
    return dataclasses.replace(row, weights_version=versions.astype(np.int32))


class Explorer:
  """Writes into a store; what is there is the ledger of what has been played.

  run: whose groups they are; the same run writes each (tag, number) once. facts: what
  it plays with, for those who read to compare. The methods are those of
  `jaxrl.data.sinks.ledger.Ledger`.
  """

  part_size = 1

  def __init__(self, database: Database, run: str, facts: Mapping[str, Any]):
    self._database, self._run = database, run
    self._waiting: dict[tuple[str, int], bytes] = {}
    sa, explorers = sqlalchemy(), database.tables.explorers
    text = json.dumps(dict(facts), sort_keys=True)
    mine = explorers.c.run == run
    with database.write() as connection:
      if connection.execute(sa.select(explorers.c.run).where(mine)).first():
        connection.execute(sa.update(explorers).where(mine).values(facts=text))
      else:
        connection.execute(sa.insert(explorers).values(run=run, facts=text))

  def played(self, tag: str) -> set[int]:
    """The numbers of a tag's groups that are in the store."""
    sa, groups = sqlalchemy(), self._database.tables.groups
    mine = (groups.c.run == self._run) & (groups.c.tag == tag)
    with self._database.read() as connection:
      return set(connection.execute(sa.select(groups.c.number).where(mine)).scalars())

  def add(self, tag: str, number: int, rows: Sequence[bytes]) -> None:
    """Takes a group, to be written by the next `seal`."""
    (self._waiting[tag, number],) = rows

  def seal(self, *, all_played: bool = False) -> int:
    """Writes what was added, at once or not at all; returns how many groups."""
    sa, tables = sqlalchemy(), self._database.tables
    groups, waiting = tables.groups, dict(self._waiting)
    if not waiting:
      return 0
    with self._database.write() as connection:
      for (tag, number), data in waiting.items():
        line = {'run': self._run, 'tag': tag, 'number': number}
        same = [groups.c[name] == value for name, value in line.items()]
        if connection.execute(sa.select(groups.c.id).where(*same)).first():
          continue
        made = connection.execute(sa.insert(groups).values(**line))
        payload = {'group_id': made.inserted_primary_key[0], 'data': data}
        connection.execute(sa.insert(tables.payloads).values(**payload))
    for key in waiting:
      del self._waiting[key]
    return len(waiting)


def run_of(folder: pathlib.Path) -> str:
  """The name by which a store knows the run that lives in `folder`; made once."""
  path = folder / 'explorer.txt'
  if not path.exists():
    half = path.with_name('.explorer.txt')
    with half.open('w') as file:
      file.write(f'{uuid.uuid4().hex}\n')
      file.flush()
      os.fsync(file.fileno())
    os.replace(half, path)
  return path.read_text().strip()
