"""A Postgres server keeps what a file keeps, for programs on several machines."""

import multiprocessing
import subprocess
import sys

import pytest

from jaxrl.data.store.reader_lease import ReaderLease
from jaxrl.data.store.store_database import StoreDatabase
from tests import postgres
from tests.data.store import stores, test_store
from tests.data.store.test_reader_lease import HOLD
from tests.processes import free_port

pytestmark = [
  pytest.mark.slow,
  pytest.mark.xdist_group('postgres'),
  pytest.mark.skipif(bool(reason := postgres.unsupported_reason()), reason=reason),
]


@pytest.fixture(scope='module')
def create():
  with postgres.server(free_port()) as made:
    yield made


@pytest.mark.parametrize(
  'test',
  [
    test_store.test_groups_come_back_to_the_last_bit,
    test_store.test_each_is_used_as_often_as_asked,
    test_store.test_a_run_goes_on_from_its_checkpoint,
    test_store.test_batches_that_no_checkpoint_knows_are_free_again,
    test_store.test_lost_groups_are_lost_until_they_are_judged_anew,
  ],
)
def test_what_holds_of_a_file_holds_of_a_server(create, monkeypatch, test):
  address = create(test.__name__)
  monkeypatch.setattr(stores, 'url', lambda folder: address)
  test('no folder')


def _write(address, run):
  stores.fill(StoreDatabase(address), range(20), run=run)


def test_several_explorers_write_at_once_and_one_trainer_reads(create):
  address = create('many')
  context = multiprocessing.get_context('spawn')
  runs = [context.Process(target=_write, args=(address, f'run{i}')) for i in range(3)]
  for process in runs:
    process.start()
  for process in runs:
    process.join(120)
    assert process.exitcode == 0
  database = StoreDatabase(address)
  holder = subprocess.Popen(
    [sys.executable, '-c', HOLD, address],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  assert holder.stdout.readline() == 'held\n'
  with pytest.raises(ValueError, match=f'process {holder.pid} on this machine'):
    ReaderLease(database, 'trainer')
  holder.kill()
  holder.communicate()
  source = stores.reader(database)
  source.begin()
  assert sorted(stores.drawn(source, 0, 60)) == sorted([*range(20)] * 3)


def test_a_server_that_is_not_there_is_one_line():
  address = f'postgresql+psycopg://me@127.0.0.1:{free_port()}/x'
  with pytest.raises(ValueError, match='cannot be opened') as error:
    StoreDatabase(address)
  assert '\n' not in str(error.value)
