"""ExperienceReader uses each group a fixed number of times, despite any restarts.

Before a step is trained, its batch (the groups that it uses) is recorded under the
step's number. The checkpoint of step s contains the effect of exactly the steps below
s. A run that continues from it asks for step s again and gets the recorded batch. So
checkpoint and store cannot disagree: what a batch did to lost weights is repeated, and
a group of one batch is in no other.
"""

import json
import logging
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxrl.data import trajectory_codec
from jaxrl.data.store.reader_lease import ReaderLease
from jaxrl.data.store.store_database import StoreDatabase, import_sqlalchemy
from jaxrl.types import Group, StateDict

log = logging.getLogger(__name__)

MAX_UNPACKED_BYTES = 2**31  # of a group, unpacked
DECIDE_BATCH = 64  # groups that are decided before more are selected


class GroupDecision(NamedTuple):
  """Says whether a group is trained on.

  Attributes:
    group: The group as it is to be trained on.
    lost: Why the group is dropped; '' if it is not.
  """

  group: Group
  drop_reason: str = ''


WriterFacts = Mapping[str, Any]  # the settings that a writer played with
DecideGroup = Callable[[Group, WriterFacts], GroupDecision]


class BatchEntry(NamedTuple):
  """A group of a batch.

  Attributes:
    group_id: The group's id in the store.
    use: How often the reader has used the group before.
    group: The trajectories.
  """

  group_id: int
  use: int
  group: Group


class ExperienceReader:
  """Draws the batches of one trainer.

  Fresh groups come first, then those used least, the oldest first among equals. A batch
  contains no group twice.

  Args:
    database: The store.
    lease: The reader's name, which this process holds.
    uses: How often each group is used.
    tags: Groups of other tags are ignored.
  """

  def __init__(
    self, database: StoreDatabase, lease: ReaderLease, *, uses: int, tags: list[str]
  ):
    self._database = database
    self._lease = lease
    self._uses = uses
    self._tags = tags
    self._run = ''
    self._facts: dict[str, WriterFacts] = {}
    self._step = -1
    self._batch = list[BatchEntry]()  # the batch that is being filled

  # ---- with checkpoints

  def check_fresh(self) -> None:
    """Checks that this name has no checkpoint in another workdir.

    Raises:
      ValueError: If it has one.
    """
    saved_step = self._row().saved
    if saved_step:
      raise ValueError(
        f'{self._database.name}: reader {self._lease.name!r} has trained up to the '
        f'checkpoint of step {saved_step} in another workdir: resume that one, or '
        "start under another name: store(url='…', reader='another')"
      )

  def begin(self) -> None:
    """Begins a run; groups used by a run that never saved a checkpoint become free."""
    self.check_fresh()
    sa, tables = import_sqlalchemy(), self._database.tables
    self._run = uuid.uuid4().hex
    mine = tables.readers.c.name == self._lease.name
    with self._database.write() as connection:
      self._lease.check(connection)
      run = sa.update(tables.readers).where(mine).values(run=self._run)
      connection.execute(run)
      self._release(connection, 0)

  def resume(self, step: int, state: StateDict) -> None:
    """Continues at `step` from a saved state.

    Args:
      step: The step of the checkpoint.
      state: What `state_dict` returned.

    Raises:
      ValueError: If the state belongs to another store or another run took the name.
    """
    sa, uses = import_sqlalchemy(), self._database.tables.uses
    where = f'{self._database.name}, reader {self._lease.name!r}'
    if state['store'] != self._database.id:
      raise ValueError(
        f'{where}: this run was trained from another store: name that one, or '
        'another workdir'
      )
    if state['run'] != self._row().run:
      raise ValueError(
        f'{where}: another run has used this reader since. Start again with '
        "another workdir and store(url='…', reader='another')"
      )
    self._run = state['run']
    later = (uses.c.reader == self._lease.name) & (uses.c.step >= step)
    with self._database.write() as connection:
      self._lease.check(connection)
      # They are decided again, possibly by other filters.
      connection.execute(sa.delete(uses).where(later, uses.c.lost != ''))
    self.mark_saved(step)

  def state_dict(self) -> dict[str, str]:
    """Returns the ids of the store and the run, as JSON."""
    return {'store': self._database.id, 'run': self._run}

  def mark_saved(self, step: int) -> None:
    """Records that the checkpoint of `step` is on disk.

    Args:
      step: The step of the checkpoint.
    """
    sa, readers = import_sqlalchemy(), self._database.tables.readers
    mine = readers.c.name == self._lease.name
    with self._database.write() as connection:
      self._lease.check(connection)
      connection.execute(sa.update(readers).where(mine).values(saved=step))

  def _row(self) -> Any:
    sa, readers = import_sqlalchemy(), self._database.tables.readers
    mine = readers.c.name == self._lease.name
    with self._database.read() as connection:
      return connection.execute(sa.select(readers).where(mine)).one()

  # ---- batches

  def draw(
    self, step: int, count: int, decide: DecideGroup, *, partial: bool = False
  ) -> list[BatchEntry]:
    """Returns the batch of `step` once there are `count` groups for it.

    Args:
      step: The training step.
      count: The number of groups of a batch.
      decide: Decides whether a group is trained on; a rejected group is lost to this
        reader.
      partial: Whether a batch of fewer groups is acceptable.

    Returns:
      The batch, or nothing if there are too few groups so far.

    Raises:
      LeaseLostError: If another process trains under this name.
    """
    if step != self._step:
      self._step = step
      self._batch = self._recorded_batch(step, count, decide)
      if self._batch:
        return self._take_batch()
    while len(self._batch) < count:
      candidates = self._unused(min(count - len(self._batch), DECIDE_BATCH))
      if not candidates:
        break
      dropped = []
      for group_id, use in candidates:
        decision = self._decide(group_id, decide)
        if decision.drop_reason:
          dropped.append((group_id, use, decision.drop_reason))
        else:
          self._batch.append(BatchEntry(group_id, use, decision.group))
      self._record_uses(step, dropped)
    if len(self._batch) < count and not (partial and self._batch):
      return []
    self._record_uses(step, [(entry.group_id, entry.use, '') for entry in self._batch])
    return self._take_batch()

  def _take_batch(self) -> list[BatchEntry]:
    batch, self._step, self._batch = self._batch, -1, []
    return batch

  def _recorded_batch(
    self, step: int, count: int, decide: DecideGroup
  ) -> list[BatchEntry]:
    """Returns the batch recorded under `step`, or nothing if it is no longer valid."""
    sa, uses = import_sqlalchemy(), self._database.tables.uses
    query = sa.select(uses.c.group_id, uses.c.use).order_by(uses.c.place)
    is_this_batch = (uses.c.reader == self._lease.name) & (uses.c.step == step)
    with self._database.read() as connection:
      recorded = list(connection.execute(query.where(is_this_batch, uses.c.lost == '')))
    decisions = [self._decide(group_id, decide) for group_id, _ in recorded]
    if len(recorded) <= count and not any(
      decision.drop_reason for decision in decisions
    ):
      pairs = zip(recorded, decisions, strict=True)
      return [BatchEntry(key.group_id, key.use, v.group) for key, v in pairs]
    with self._database.write() as connection:  # the settings have changed since then
      self._lease.check(connection)
      self._release(connection, step)
    return []

  def _release(self, connection: Any, step: int) -> None:
    sa, uses = import_sqlalchemy(), self._database.tables.uses
    later = (uses.c.reader == self._lease.name) & (uses.c.step >= step)
    connection.execute(sa.delete(uses).where(later))

  def _select_usable(self) -> Any:
    """Selects groups of our tags and their use counts; dropped means used up."""
    sa, tables = import_sqlalchemy(), self._database.tables
    groups, uses = tables.groups, tables.uses
    each = sa.case((uses.c.lost == '', 1), else_=self._uses)
    use_counts = (
      sa.select(uses.c.group_id, sa.func.sum(each).label('used'))
      .where(uses.c.reader == self._lease.name)
      .group_by(uses.c.group_id)
      .subquery()
    )
    used = sa.func.coalesce(use_counts.c.used, 0).label('used')
    joined = groups.outerjoin(use_counts, groups.c.id == use_counts.c.group_id)
    return (
      sa.select(groups.c.id, used)
      .select_from(joined)
      .where(groups.c.tag.in_(self._tags), used < self._uses)
      .order_by(used, groups.c.id)
    )

  def _unused(self, count: int) -> list[tuple[int, int]]:
    """Returns the next groups for the batch with the number of this use of each."""
    in_batch = {entry.group_id for entry in self._batch}
    with self._database.read() as connection:
      rows = connection.execute(self._select_usable().limit(count + len(in_batch)))
      return [(row.id, row.used) for row in rows if row.id not in in_batch][:count]

  def _decide(self, group_id: int, decide: DecideGroup) -> GroupDecision:
    sa, tables = import_sqlalchemy(), self._database.tables
    groups, payloads = tables.groups, tables.payloads
    query = sa.select(groups.c.run, payloads.c.data).where(
      groups.c.id == group_id, payloads.c.group_id == groups.c.id
    )
    with self._database.read() as connection:
      run, data = connection.execute(query).one()
    if run not in self._facts:
      self._facts = self.writer_facts()
    try:
      (group,) = trajectory_codec.from_bytes(bytes(data), MAX_UNPACKED_BYTES)
      if not group:
        raise ValueError('a group without rows')
    except (ValueError, TypeError, RecursionError) as error:
      log.warning(
        '%s, group %d of run %s cannot be read and is left out: %s; to have it back, '
        'restore its row of the table %s from a copy of the store',
        *(self._database.name, group_id, run, error, payloads.name),
      )
      return GroupDecision([], 'unreadable')
    return decide(group, self._facts[run])

  def writer_facts(self) -> dict[str, WriterFacts]:
    """Returns the settings of the writers.

    Returns:
      For each run that wrote into the store what it played with.
    """
    query = import_sqlalchemy().select(self._database.tables.explorers)
    with self._database.read() as connection:
      return {row.run: json.loads(row.facts) for row in connection.execute(query)}

  def _record_uses(self, step: int, lines: list[tuple[int, int, str]]) -> None:
    """Records uses of groups under a step, all or none."""
    if not lines:
      return
    sa, uses = import_sqlalchemy(), self._database.tables.uses
    shared = {'reader': self._lease.name, 'step': step}
    with self._database.write() as connection:
      self._lease.check(connection)
      rows = [
        {
          **shared,
          'group_id': group_id,
          'use': use,
          'place': position,
          'lost': lost[:64],
        }
        for position, (group_id, use, lost) in enumerate(lines)
      ]
      connection.execute(sa.insert(uses), rows)

  def num_left(self) -> int:
    """Returns how many groups this reader has not used up.

    Returns:
      The number of groups.
    """
    sa = import_sqlalchemy()
    with self._database.read() as connection:
      count = sa.select(sa.func.count()).select_from(self._select_usable().subquery())
      return int(connection.execute(count).scalar_one())

  def num_groups(self) -> int:
    """Returns how many groups of our tags the store has.

    Returns:
      The number of groups.
    """
    sa, groups = import_sqlalchemy(), self._database.tables.groups
    count = sa.select(sa.func.count()).where(groups.c.tag.in_(self._tags))
    with self._database.read() as connection:
      return int(connection.execute(count).scalar_one())
