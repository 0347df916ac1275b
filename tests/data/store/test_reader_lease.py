"""One process trains under a reader's name."""

import os
import subprocess
import sys

import pytest

from jaxrl.data.store import reader_lease
from jaxrl.data.store.reader_lease import LeaseLostError, ReaderLease
from tests.data.store.stores import drawn, fill, opened, reader, url

HOLD = """
import os, sys
from jaxrl.data.store.store_database import StoreDatabase
from jaxrl.data.store.reader_lease import ReaderLease
ReaderLease(StoreDatabase(sys.argv[1]), 'trainer')
print('held', flush=True)
sys.stdin.read()
os._exit(9)
"""


def test_a_second_trainer_is_refused_until_the_first_is_gone(tmp_path):
  database = opened(tmp_path)
  first = subprocess.Popen(
    [sys.executable, '-c', HOLD, url(tmp_path)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  assert first.stdout.readline() == 'held\n'
  with pytest.raises(ValueError, match=f'process {first.pid} on this machine'):
    ReaderLease(database, 'trainer')
  ReaderLease(database, 'another').close()
  first.kill()
  first.communicate()
  second = ReaderLease(database, 'trainer')
  with pytest.raises(ValueError, match=f'process {os.getpid()} on this machine'):
    ReaderLease(database, 'trainer')
  second.close()
  ReaderLease(database, 'trainer').close()


def test_one_elsewhere_is_watched(tmp_path, monkeypatch):
  database = opened(tmp_path)
  monkeypatch.setattr(reader_lease, '_machine', lambda: 'far/away')
  far = ReaderLease(database, 'trainer')
  far._stopped.set()  # it beats only when it is told to, however slow this machine is
  monkeypatch.undo()
  slept, messages = [], []

  def beat(seconds):
    slept.append(seconds)
    if len(slept) == 3:
      with database.write() as connection:
        far.check(connection)

  with pytest.raises(ValueError, match='on far trains from it'):
    ReaderLease(database, 'trainer', sleep=beat, say=messages.append)
  assert len(slept) == 3 and 'waiting 30 s' in messages[0]
  silent = ReaderLease(database, 'trainer', sleep=slept.append, say=messages.append)
  assert sum(slept[3:]) == reader_lease.LEASE_TIMEOUT_S
  with database.write() as connection:
    silent.check(connection)
    with pytest.raises(LeaseLostError, match='another process trains'):
      far.check(connection)


def test_who_lost_the_name_draws_nothing(tmp_path, monkeypatch):
  database = opened(tmp_path)
  fill(database, range(2))
  monkeypatch.setattr(reader_lease, '_machine', lambda: 'far/away')
  paused = reader(database)
  paused.begin()
  paused._lease._stopped.set()  # paused: it gives no sign of life
  monkeypatch.undo()
  ReaderLease(database, 'trainer', sleep=lambda seconds: None)
  with pytest.raises(LeaseLostError):
    drawn(paused, 0, 1)
  with pytest.raises(LeaseLostError):
    paused.mark_saved(1)


def test_a_number_that_another_process_has_now_is_no_owner(tmp_path, monkeypatch):
  database = opened(tmp_path)
  monkeypatch.setattr(reader_lease, '_start_time', lambda pid: '1.00')
  ReaderLease(database, 'trainer')
  monkeypatch.undo()
  ReaderLease(database, 'trainer').close()


def test_signs_of_life(tmp_path, monkeypatch):
  database = opened(tmp_path)
  monkeypatch.setattr(reader_lease, 'LEASE_HEARTBEAT_S', 0.01)
  held = ReaderLease(database, 'trainer')

  def beats():
    with database.read() as connection:
      return connection.execute(database.tables.readers.select()).one().beat

  before = beats()
  while beats() < before + 3:  # else the test's own time limit ends it
    pass
  held.close()
