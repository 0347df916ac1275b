"""MaxCompute tables, against a stand-in of the service: each part once."""

import pytest

from jaxrl.data.trajectory_writers import maxcompute_writer
from jaxrl.data.trajectory_writers.dump_journal import DumpJournal
from tests.data.trajectory_writers.service import serve

PATH = 'odps://lab/tables/played/ds=one'
TYPES = {
  'task_idx': 'bigint', 'episode_score': 'double', 'mode': 'string', 'ok': 'boolean',
  'tiny': 'tinyint', 'small': 'smallint', 'whole': 'int', 'half': 'float',
}  # fmt: skip


def line(i):
  return {
    'task_idx': i, 'episode_score': 0.1, 'mode': 'train ä\n', 'ok': True,
    'tiny': -128, 'small': 5, 'whole': None, 'half': 0.5,
  }  # fmt: skip


@pytest.fixture
def service(monkeypatch):
  pytest.importorskip('odps')
  with serve(TYPES) as (service, address):
    monkeypatch.setenv('ODPS_ENDPOINT', f'{address}/api')
    monkeypatch.setenv('ODPS_TUNNEL_ENDPOINT', address)
    monkeypatch.setenv('ODPS_ACCESS_ID', 'id')
    monkeypatch.setenv('ODPS_ACCESS_KEY', 'key')
    yield service


def table(folder, types=TYPES, path=PATH):
  return maxcompute_writer.MaxComputeWriter(path, types, folder / 'uploads')


def test_rows_come_to_the_table_typed(service, tmp_path):
  sink = table(tmp_path)
  sink.check(fresh=True)
  assert service.committed == []
  sink.write('t-00000', [line(0), line(1)])
  assert service.rows() == [line(0), line(1)]
  [upload] = service.committed
  assert service.sessions[upload]['partition'] == 'ds=one'
  assert any(query.get('create_partition') == 'true' for *_, query in service.requests)
  sink.write('t-00000', [line(0), line(1)])
  table(tmp_path).write('t-00000', [line(0), line(1)])
  assert len(service.committed) == 1


def test_columns_that_the_dump_does_not_have_are_null(service, tmp_path):
  table(tmp_path, {'mode': 'string'}).write('t-00000', [{'mode': 'val'}])
  assert service.rows() == [{**dict.fromkeys(TYPES), 'mode': 'val'}]


@pytest.mark.parametrize('lost', ['after', 'before'])
def test_a_commit_whose_answer_is_lost_is_not_made_twice(service, tmp_path, lost):
  ledger = DumpJournal(tmp_path, table(tmp_path), part_size=2)
  for i in (0, 1):
    ledger.add('t', i, [line(i)])
  service.break_commit = [lost]
  with pytest.raises(Exception, match='the answer was lost'):
    ledger.flush()
  DumpJournal(tmp_path, table(tmp_path))
  assert [row['task_idx'] for row in service.rows()] == [0, 1]


def test_an_upload_that_the_service_forgot_is_not_guessed_at(service, tmp_path):
  table(tmp_path).write('t-00000', [line(0)])
  for forget in (
    lambda: service.sessions[service.committed[0]].update(status='expired'),
    lambda: service.sessions.clear(),
  ):
    forget()
    with pytest.raises(OSError, match='part t-00000 reached the table is not known'):
      table(tmp_path).write('t-00000', [line(0)])


def test_what_is_wrong_with_the_table_is_told_at_once(service, tmp_path, monkeypatch):
  with pytest.raises(ValueError, match="'given', a string, is not in the table"):
    table(tmp_path, {'given': 'string'}).check(fresh=True)
  with pytest.raises(ValueError, match="'whole', a bigint, is a int in the table"):
    table(tmp_path, {'whole': 'bigint'}).check(fresh=True)
  with pytest.raises(ValueError, match=r'cannot write there.*no such table'):
    table(tmp_path, path='odps://lab/tables/other').check(fresh=True)
  monkeypatch.delenv('ODPS_ENDPOINT')
  with pytest.raises(ValueError, match='set ODPS_ENDPOINT'):
    table(tmp_path).check(fresh=True)


@pytest.mark.parametrize('path', ['odps://lab', 'odps:/lab/tables/t', f'{PATH}/x'])
def test_a_path_of_another_form(path, tmp_path):
  with pytest.raises(ValueError, match='odps://PROJECT/tables/TABLE'):
    table(tmp_path, path=path)


def test_without_pyodps_it_says_so(monkeypatch, tmp_path):
  monkeypatch.setitem(__import__('sys').modules, 'odps', None)
  with pytest.raises(ValueError, match=r"pip install -e '\.\[odps\]'"):
    table(tmp_path).check(fresh=True)
