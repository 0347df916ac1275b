"""Who trains under a reader's name: one process at a time."""

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from jaxrl.data.store.database import Database, sqlalchemy
from jaxrl.signature import ConfigError

BEAT = 5.0  # seconds between signs of life
SILENCE = 30.0  # seconds without one after which an owner elsewhere is dead


class Lost(RuntimeError):
  """Another process trains under this reader's name now."""


class Lease:
  """A reader's name, held by this process until `close`.

  An owner that died on this machine is replaced at once, one elsewhere when it has
  given no sign of life for `SILENCE` seconds, by no clock but ours. Raises ConfigError
  when an owner lives. A paused owner that comes back finds in its next transaction
  that it has lost the name (`check`).
  """

  def __init__(
    self,
    database: Database,
    name: str,
    *,
    sleep: Callable[[float], None] = time.sleep,
    say: Callable[[str], None] = lambda text: None,
  ):
    self._database, self.name = database, name
    self.owner = f'{_machine()} {os.getpid()} {_born(os.getpid())} {uuid.uuid4().hex}'
    self._claim(sleep, say)
    self._end = threading.Event()
    self._heart = threading.Thread(target=self._beat, daemon=True)
    self._heart.start()

  def _claim(self, sleep: Callable[[float], None], say: Callable[[str], None]) -> None:
    seen, waited = None, 0.0
    while True:
      sign = self._try(dead=seen if waited >= SILENCE else None)
      if sign is None:
        return
      machine, pid, *_ = sign[0].split(' ')
      here = machine == _machine()
      if here or seen not in (None, sign):
        where = 'on this machine' if here else f'on {machine.split("/")[0]}'
        raise ConfigError(
          f'{self._database.name}: process {pid} {where} trains from it as reader '
          f'{self.name!r}: wait for it, or count uses apart by '
          "--config.data.source=\"store(url='…', reader='another')\""
        )
      if seen is None:
        say(
          f'{self._database.name}: reader {self.name!r} was held by process {pid} on '
          f'{machine.split("/")[0]}: waiting {SILENCE:g} s for a sign of life'
        )
      seen = sign
      sleep(1.0)
      waited += 1.0

  def _try(self, dead: tuple[str, int] | None) -> tuple[str, int] | None:
    """Takes the name if it is free; else its owner and the owner's last beat.

    dead: an owner and beat that count as dead.
    """
    sa, readers = sqlalchemy(), self._database.tables.readers
    mine = readers.c.name == self.name
    taken = {'owner': self.owner, 'beat': 0}
    asked = sa.select(readers.c.owner, readers.c.beat).where(mine).with_for_update()
    with self._database.write() as connection:
      row = connection.execute(asked).first()
      if row is None:
        new = {'name': self.name, 'run': '', **taken}
        connection.execute(sa.insert(readers).values(**new))
      elif not row.owner or _gone(row.owner) or tuple(row) == dead:
        connection.execute(sa.update(readers).where(mine).values(**taken))
      else:
        return row.owner, row.beat
    return None

  def _mine(self) -> Any:
    readers = self._database.tables.readers
    return (readers.c.name == self.name) & (readers.c.owner == self.owner)

  def check(self, connection: Any) -> None:
    """Raises Lost, within a transaction, unless the name is held until its end."""
    sa, readers = sqlalchemy(), self._database.tables.readers
    beat = sa.update(readers).where(self._mine()).values(beat=readers.c.beat + 1)
    if connection.execute(beat).rowcount != 1:
      raise Lost(
        f'{self._database.name}: another process trains as reader {self.name!r} now'
      )

  def _beat(self) -> None:
    while not self._end.wait(BEAT):
      try:
        with self._database.write() as connection:
          self.check(connection)
      except Lost:
        return  # whoever draws next is told
      except sqlalchemy().exc.SQLAlchemyError:
        continue  # the same

  def close(self) -> None:
    """Lets go of the name, if the database still answers."""
    sa, readers = sqlalchemy(), self._database.tables.readers
    self._end.set()
    self._heart.join()
    gone = sa.exc.SQLAlchemyError
    with contextlib.suppress(gone), self._database.write() as connection:
      free = sa.update(readers).where(self._mine()).values(owner='')
      connection.execute(free)


def _machine() -> str:
  """Names what gives out process ids: a machine, or a container on it."""
  try:
    space = os.readlink('/proc/self/ns/pid')
  except OSError:
    space = 'pid'
  return f'{socket.gethostname()}/{space}'.replace(' ', '-')


def _born(pid: int) -> str:
  """When a process began, which tells it from a later one of its number; '' if none."""
  import psutil

  try:
    process = psutil.Process(pid)
    ended = process.status() == psutil.STATUS_ZOMBIE
    return '' if ended else f'{process.create_time():.2f}'
  except psutil.Error:
    return ''


def _gone(owner: str) -> bool:
  """Whether an owner on this machine is no longer there."""
  machine, pid, born, _ = owner.split(' ')
  return machine == _machine() and _born(int(pid)) != born
