"""ReaderLease ensures that one process at a time trains under a reader's name."""

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from jaxrl.data.store.store_database import StoreDatabase, import_sqlalchemy

LEASE_HEARTBEAT_S = 5.0  # seconds between signs of life
LEASE_TIMEOUT_S = 30.0  # seconds without one after which an owner elsewhere is dead


class LeaseLostError(RuntimeError):
  """Reports that another process now trains under this reader's name."""


class ReaderLease:
  """A reader's name, held by this process until `close`.

  An owner that died on this machine is replaced at once. An owner elsewhere is replaced
  after LEASE_TIMEOUT_S seconds without a heartbeat, measured by our own clock only.
  A paused owner that comes back learns from `check` in its next transaction that it has
  lost the name.

  Args:
    database: The store.
    name: The reader's name.
    sleep: Waits for a number of seconds.
    say: Receives messages for the user.

  Raises:
    ValueError: If the current owner is alive.
  """

  def __init__(
    self,
    database: StoreDatabase,
    name: str,
    *,
    sleep: Callable[[float], None] = time.sleep,
    say: Callable[[str], None] = lambda text: None,
  ):
    self._database = database
    self.name = name
    self.owner = (
      f'{_machine()} {os.getpid()} {_start_time(os.getpid())} {uuid.uuid4().hex}'
    )
    self._claim(sleep, say)
    self._stopped = threading.Event()
    self._thread = threading.Thread(target=self._heartbeat, daemon=True)
    self._thread.start()

  def _claim(self, sleep: Callable[[float], None], say: Callable[[str], None]) -> None:
    last_sign, waited = None, 0.0
    while True:
      sign = self._try(dead=last_sign if waited >= LEASE_TIMEOUT_S else None)
      if sign is None:
        return
      machine, pid, *_ = sign[0].split(' ')
      on_this_machine = machine == _machine()
      if on_this_machine or last_sign not in (None, sign):
        where = 'on this machine' if on_this_machine else f'on {machine.split("/")[0]}'
        raise ValueError(
          f'{self._database.name}: process {pid} {where} trains from it as reader '
          f'{self.name!r}: wait for it, or count uses separately by '
          "dataset.experience_store=\"store(url='…', reader='another')\""
        )
      if last_sign is None:
        say(
          f'{self._database.name}: reader {self.name!r} was held by process {pid} on '
          f'{machine.split("/")[0]}: waiting {LEASE_TIMEOUT_S:g} s '
          'for a sign of life'
        )
      last_sign = sign
      sleep(1.0)
      waited += 1.0

  def _try(self, dead: tuple[str, int] | None) -> tuple[str, int] | None:
    """Takes the name if it is free; otherwise returns its owner and last heartbeat.

    `dead` is an owner and heartbeat that count as dead.
    """
    sa, readers = import_sqlalchemy(), self._database.tables.readers
    is_ours = readers.c.name == self.name
    ownership = {'owner': self.owner, 'beat': 0}
    query = sa.select(readers.c.owner, readers.c.beat).where(is_ours).with_for_update()
    with self._database.write() as connection:
      row = connection.execute(query).first()
      if row is None:
        new = {'name': self.name, 'run': '', **ownership}
        connection.execute(sa.insert(readers).values(**new))
      elif not row.owner or _is_dead(row.owner) or tuple(row) == dead:
        connection.execute(sa.update(readers).where(is_ours).values(**ownership))
      else:
        return row.owner, row.beat
    return None

  def _is_ours(self) -> Any:
    readers = self._database.tables.readers
    return (readers.c.name == self.name) & (readers.c.owner == self.owner)

  def check(self, connection: Any) -> None:
    """Checks within a transaction that the name is held until the transaction ends.

    Args:
      connection: The transaction's connection.

    Raises:
      LeaseLostError: If another process holds the name.
    """
    sa, readers = import_sqlalchemy(), self._database.tables.readers
    beat = sa.update(readers).where(self._is_ours()).values(beat=readers.c.beat + 1)
    if connection.execute(beat).rowcount != 1:
      raise LeaseLostError(
        f'{self._database.name}: another process trains as reader {self.name!r} now'
      )

  def _heartbeat(self) -> None:
    while not self._stopped.wait(LEASE_HEARTBEAT_S):
      try:
        with self._database.write() as connection:
          self.check(connection)
      except LeaseLostError:
        return  # the next draw reports it
      except import_sqlalchemy().exc.SQLAlchemyError:
        continue  # the next draw reports it

  def close(self) -> None:
    """Releases the name, if the database still answers."""
    sa, readers = import_sqlalchemy(), self._database.tables.readers
    self._stopped.set()
    self._thread.join()
    database_error = sa.exc.SQLAlchemyError
    with contextlib.suppress(database_error), self._database.write() as connection:
      release = sa.update(readers).where(self._is_ours()).values(owner='')
      connection.execute(release)


def _machine() -> str:
  """Identifies the scope of process ids: a machine, or a container on it."""
  try:
    space = os.readlink('/proc/self/ns/pid')
  except OSError:
    space = 'pid'
  return f'{socket.gethostname()}/{space}'.replace(' ', '-')


def _start_time(pid: int) -> str:
  """Returns when a process started, which tells reused ids apart; '' if it is gone."""
  import psutil

  try:
    process = psutil.Process(pid)
    ended = process.status() == psutil.STATUS_ZOMBIE
    return '' if ended else f'{process.create_time():.2f}'
  except psutil.Error:
    return ''


def _is_dead(owner: str) -> bool:
  """Returns whether an owner on this machine no longer exists."""
  machine, pid, born, _ = owner.split(' ')
  return machine == _machine() and _start_time(int(pid)) != born
