"""Trainers: each group is used so often, whatever is killed and started again.

Before a step is trained, the groups it uses are written down under its number, its
batch. The trainer's checkpoint of step s holds the effect of the steps below s and of
no other; a run that goes on from it asks for step s again, and is given the batch that
is written there. So checkpoint and store cannot disagree: what a batch did to weights
that were lost is done again, and a group of a batch is in no other.
"""

import json
import logging
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxrl.data import trajectories
from jaxrl.data.store.database import Database, sqlalchemy
from jaxrl.data.store.lease import Lease
from jaxrl.signature import ConfigError
from jaxrl.types import Group

log = logging.getLogger(__name__)

MAX_BYTES = 2**31  # of a group, unpacked
AT_ONCE = 64  # groups that are judged before others are looked for


class Verdict(NamedTuple):
  """group: as it is to be trained on. lost: the reason why it is not; '' if it is."""

  group: Group
  lost: str = ''


Facts = Mapping[str, Any]  # what an explorer played with
Judge = Callable[[Group, Facts], Verdict]


class Place(NamedTuple):
  """A group of a batch. use: 0 the first time that the reader uses it."""

  group_id: int
  use: int
  group: Group


class Reader:
  """Draws the batches of one trainer.

  lease: the reader's name, held. uses: how often each group is used. tags: groups of
  other tags are left alone. Fresh groups come first, then those used least, the oldest
  first among equals; a batch has no group twice.
  """

  def __init__(self, database: Database, lease: Lease, *, uses: int, tags: list[str]):
    self._database, self._lease = database, lease
    self._uses, self._tags = uses, tags
    self._run = ''
    self._facts: dict[str, Facts] = {}
    self._step, self._kept = -1, list[Place]()  # the batch that is being filled

  # ---- with checkpoints

  def check_fresh(self) -> None:
    """Raises ConfigError when this name has a checkpoint, in another workdir."""
    saved = self._row().saved
    if saved:
      raise ConfigError(
        f'{self._database.name}: reader {self._lease.name!r} has trained up to the '
        f'checkpoint of step {saved} in another --workdir: resume that one, or begin '
        "anew under another name: store(url='…', reader='another')"
      )

  def begin(self) -> None:
    """Begins a run. What one that never had a checkpoint has used is free again."""
    self.check_fresh()
    sa, tables = sqlalchemy(), self._database.tables
    self._run = uuid.uuid4().hex
    mine = tables.readers.c.name == self._lease.name
    with self._database.write() as connection:
      self._lease.check(connection)
      run = sa.update(tables.readers).where(mine).values(run=self._run)
      connection.execute(run)
      self._release(connection, 0)

  def resume(self, step: int, state: Mapping[str, Any]) -> None:
    """Goes on at `step` from what `state_dict` gave. Raises ConfigError for others'."""
    sa, uses = sqlalchemy(), self._database.tables.uses
    where = f'{self._database.name}, reader {self._lease.name!r}'
    if state['store'] != self._database.id:
      raise ConfigError(f'{where}: not the store that this run has trained from')
    if state['run'] != self._row().run:
      raise ConfigError(f'{where}: another run has trained under this name since')
    self._run = state['run']
    later = (uses.c.reader == self._lease.name) & (uses.c.step >= step)
    with self._database.write() as connection:
      self._lease.check(connection)
      # They are judged anew, by what may be other filters.
      connection.execute(sa.delete(uses).where(later, uses.c.lost != ''))
    self.saved(step)

  def state_dict(self) -> dict[str, str]:
    return {'store': self._database.id, 'run': self._run}

  def saved(self, step: int) -> None:
    """The checkpoint of `step` is on disk."""
    sa, readers = sqlalchemy(), self._database.tables.readers
    mine = readers.c.name == self._lease.name
    with self._database.write() as connection:
      self._lease.check(connection)
      connection.execute(sa.update(readers).where(mine).values(saved=step))

  def _row(self) -> Any:
    sa, readers = sqlalchemy(), self._database.tables.readers
    mine = readers.c.name == self._lease.name
    with self._database.read() as connection:
      return connection.execute(sa.select(readers).where(mine)).one()

  # ---- batches

  def draw(
    self, step: int, count: int, judge: Judge, *, partial: bool = False
  ) -> list[Place]:
    """The batch of `step`, once there are `count` groups for it; else nothing yet.

    judge: says of each group whether it is trained on; one that is not is lost to this
    reader. partial: a batch of fewer groups will do. Raises `lease.Lost`.
    """
    if step != self._step:
      self._step, self._kept = step, self._written(step, count, judge)
      if self._kept:
        return self._given()
    while len(self._kept) < count:
      found = self._unused(min(count - len(self._kept), AT_ONCE))
      if not found:
        break
      lost = []
      for group_id, use in found:
        verdict = self._judged(group_id, judge)
        if verdict.lost:
          lost.append((group_id, use, verdict.lost))
        else:
          self._kept.append(Place(group_id, use, verdict.group))
      self._write(step, lost)
    if len(self._kept) < count and not (partial and self._kept):
      return []
    self._write(step, [(place.group_id, place.use, '') for place in self._kept])
    return self._given()

  def _given(self) -> list[Place]:
    batch, self._step, self._kept = self._kept, -1, []
    return batch

  def _written(self, step: int, count: int, judge: Judge) -> list[Place]:
    """The batch that is written under `step`; nothing when it no longer serves."""
    sa, uses = sqlalchemy(), self._database.tables.uses
    asked = sa.select(uses.c.group_id, uses.c.use).order_by(uses.c.place)
    mine = (uses.c.reader == self._lease.name) & (uses.c.step == step)
    with self._database.read() as connection:
      found = list(connection.execute(asked.where(mine, uses.c.lost == '')))
    verdicts = [self._judged(group_id, judge) for group_id, _ in found]
    if len(found) <= count and not any(verdict.lost for verdict in verdicts):
      pairs = zip(found, verdicts, strict=True)
      return [Place(key.group_id, key.use, v.group) for key, v in pairs]
    with self._database.write() as connection:  # other settings than then
      self._lease.check(connection)
      self._release(connection, step)
    return []

  def _release(self, connection: Any, step: int) -> None:
    sa, uses = sqlalchemy(), self._database.tables.uses
    later = (uses.c.reader == self._lease.name) & (uses.c.step >= step)
    connection.execute(sa.delete(uses).where(later))

  def _counted(self) -> Any:
    """Groups of our tags, and how often they have been used; lost is used up."""
    sa, tables = sqlalchemy(), self._database.tables
    groups, uses = tables.groups, tables.uses
    each = sa.case((uses.c.lost == '', 1), else_=self._uses)
    counted = (
      sa.select(uses.c.group_id, sa.func.sum(each).label('used'))
      .where(uses.c.reader == self._lease.name)
      .group_by(uses.c.group_id)
      .subquery()
    )
    used = sa.func.coalesce(counted.c.used, 0).label('used')
    joined = groups.outerjoin(counted, groups.c.id == counted.c.group_id)
    return (
      sa.select(groups.c.id, used)
      .select_from(joined)
      .where(groups.c.tag.in_(self._tags), used < self._uses)
      .order_by(used, groups.c.id)
    )

  def _unused(self, count: int) -> list[tuple[int, int]]:
    """The next groups for the batch, and the number of this use of each."""
    kept = {place.group_id for place in self._kept}
    with self._database.read() as connection:
      found = connection.execute(self._counted().limit(count + len(kept)))
      return [(row.id, row.used) for row in found if row.id not in kept][:count]

  def _judged(self, group_id: int, judge: Judge) -> Verdict:
    sa, tables = sqlalchemy(), self._database.tables
    groups, payloads = tables.groups, tables.payloads
    asked = sa.select(groups.c.run, payloads.c.data).where(
      groups.c.id == group_id, payloads.c.group_id == groups.c.id
    )
    with self._database.read() as connection:
      run, data = connection.execute(asked).one()
    if run not in self._facts:
      self._facts = self.explorers()
    try:
      (group,) = trajectories.from_bytes(bytes(data), MAX_BYTES)
    except ValueError as error:
      log.warning('%s, group %d: %s', self._database.name, group_id, error)
      return Verdict([], 'unreadable')
    return judge(group, self._facts[run])

  def explorers(self) -> dict[str, Facts]:
    """What those who wrote played with, by their run."""
    asked = sqlalchemy().select(self._database.tables.explorers)
    with self._database.read() as connection:
      return {row.run: json.loads(row.facts) for row in connection.execute(asked)}

  def _write(self, step: int, lines: list[tuple[int, int, str]]) -> None:
    """Writes uses of groups under a step, all or none."""
    if not lines:
      return
    sa, uses = sqlalchemy(), self._database.tables.uses
    shared = {'reader': self._lease.name, 'step': step}
    with self._database.write() as connection:
      self._lease.check(connection)
      rows = [
        {**shared, 'group_id': group_id, 'use': use, 'place': place, 'lost': lost[:64]}
        for place, (group_id, use, lost) in enumerate(lines)
      ]
      connection.execute(sa.insert(uses), rows)

  def left(self) -> int:
    """How many groups this reader has not used up."""
    sa = sqlalchemy()
    with self._database.read() as connection:
      counted = sa.select(sa.func.count()).select_from(self._counted().subquery())
      return int(connection.execute(counted).scalar_one())

  def size(self) -> int:
    """How many groups of our tags there are."""
    sa, groups = sqlalchemy(), self._database.tables.groups
    counted = sa.select(sa.func.count()).where(groups.c.tag.in_(self._tags))
    with self._database.read() as connection:
      return int(connection.execute(counted).scalar_one())
