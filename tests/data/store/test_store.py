"""A store gives back what was written, and every group as often as asked."""

import dataclasses
import multiprocessing
import sqlite3
import zlib

import numpy as np
import pytest

from jaxrl.data.store import experience_writer, store_options
from jaxrl.data.store.experience_reader import GroupDecision
from jaxrl.data.store.experience_writer import (
  ExperienceWriter,
  GroupSerializer,
  writer_run_id,
)
from jaxrl.data.store.store_database import StoreDatabase
from jaxrl.data.store.store_options import parse_store_options
from jaxrl.options import ConfigError
from jaxrl.types import Trajectory
from tests.data.store.stores import drawn, fill, keep, opened, reader, rich, url


def same(a, b):
  for field in dataclasses.fields(Trajectory):
    x, y = getattr(a, field.name), getattr(b, field.name)
    if isinstance(x, np.ndarray):
      assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())
    else:
      assert repr(x) == repr(y), field.name


def test_groups_come_back_to_the_last_bit(tmp_path):
  written = [[rich(0), rich(1)], [rich(2)]]
  explorer = ExperienceWriter(opened(tmp_path), 'one', {'temperature': 0.5})
  for number, group in enumerate(written):
    explorer.add('t', number, GroupSerializer().rows(group, number, mode='train'))
  assert explorer.flush() == 2
  source = reader(opened(tmp_path))
  source.begin()
  heard = []
  places = source.draw(0, 2, lambda g, facts: heard.append(facts) or GroupDecision(g))
  assert heard == [{'temperature': 0.5}] * 2
  for place, group in zip(places, written, strict=True):
    assert len(place.group) == len(group)
    for restored, row in zip(place.group, group, strict=True):
      same(restored, row)


def test_versions_are_counted_from_those_that_play():
  from jaxrl.data import trajectory_codec

  (data,) = GroupSerializer(version=40).rows([rich()], 0)
  ((restored,),) = trajectory_codec.from_bytes(data)
  assert restored.weights_version.tolist() == [-1, 47, 47, -1, 48]
  assert restored.weights_version.dtype == np.int32


def test_a_group_is_written_once(tmp_path, monkeypatch):
  database = opened(tmp_path)
  assert fill(database, [3, 1]) == 2
  fill(database, [1, 2])  # after a kill, before which 1 was written
  assert ExperienceWriter(database, 'one', {}).played_items('t') == {1, 2, 3}
  assert ExperienceWriter(database, 'one', {}).played_items('other') == set()
  fill(database, [1], run='two')  # another explorer's 1 is another group
  source = reader(database)
  assert (source.num_groups(), source.num_left()) == (4, 4)
  monkeypatch.setattr(experience_writer, 'MAX_GROUP_BYTES', 10)
  with pytest.raises(ValueError, match='more than the 10'):
    fill(database, [9])
  assert writer_run_id(tmp_path) == writer_run_id(tmp_path) != ''


def test_each_is_used_as_often_as_asked(tmp_path):
  database = opened(tmp_path)
  fill(database, range(4))
  fill(database, [0], tag='another')
  source = reader(database, uses=2)
  source.begin()
  assert drawn(source, 0, 3) == [0, 1, 2]
  assert drawn(source, 1, 3) == [3, 0, 1]  # what was never used comes first
  assert drawn(source, 2, 3) == []  # none twice in a batch
  fill(database, [4])
  assert drawn(source, 2, 3) == [2, 3, 4]
  assert drawn(source, 3, 2) == []
  assert drawn(source, 3, 2, partial=True) == [4]
  assert drawn(source, 4, 2, partial=True) == []
  assert (source.num_groups(), source.num_left()) == (5, 0)
  other = reader(database, name='other')
  other.begin()
  assert drawn(other, 0, 5) == [0, 1, 2, 3, 4]


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
  database = opened(tmp_path)
  fill(database, range(9))
  first = reader(database)
  first.begin()
  batches = [drawn(first, step, 2) for step in range(3)]
  first.mark_saved(1)
  state = first.state_dict()
  first._lease.close()
  second = reader(database)
  with pytest.raises(ValueError, match='up to the checkpoint of step 1 in another'):
    second.begin()
  second.resume(1, state)
  fill(database, [9])
  assert [drawn(second, step, 2) for step in (1, 2)] == batches[1:]
  assert drawn(second, 3, 2) == [6, 7]
  second.mark_saved(4)
  second.resume(2, state)  # the newest checkpoints are lost
  assert [drawn(second, step, 2) for step in (2, 3)] == [batches[2], [6, 7]]
  with pytest.raises(ValueError, match='another run has used'):
    second.resume(2, state | {'run': 'x'})
  with pytest.raises(ValueError, match='another store'):
    second.resume(2, state | {'store': 'x'})


def test_batches_that_no_checkpoint_knows_are_free_again(tmp_path):
  database = opened(tmp_path)
  fill(database, range(4))
  first = reader(database)
  first.begin()
  assert drawn(first, 0, 2) == [0, 1]
  first.begin()
  assert drawn(first, 0, 4) == [0, 1, 2, 3]
  state = first.state_dict()
  first.resume(0, state)
  assert drawn(first, 0, 3) == [0, 1, 2]  # smaller batches: drawn anew
  assert drawn(first, 1, 1) == [3]


def test_lost_groups_are_lost_until_they_are_judged_anew(tmp_path):
  database = opened(tmp_path)
  fill(database, range(6))

  def even(group, facts):
    return GroupDecision(group, '' if group[0].env_group % 2 == 0 else 'odd')

  source = reader(database, uses=2)
  source.begin()
  assert drawn(source, 0, 2, even) == [0, 2]
  assert drawn(source, 1, 3, even) == [4, 0, 2]
  assert source.num_left() == 1  # 4, once more
  source.resume(0, source.state_dict())
  assert drawn(source, 0, 2, keep) == [0, 2]
  assert drawn(source, 1, 3, keep) == [4, 0, 2]
  assert drawn(source, 2, 3, keep) == [1, 3, 5]


TEXTS = [
  b'',
  b'[]',
  b'5',
  b'[5]',
  b'[[]]',
  b'[[5]]',
  b'[[{}]]',
  b'{"a": [[]]}',
  b'[' * 99,
]


@pytest.mark.parametrize(
  'damage',
  [
    lambda data: b'\x80\x04\x95\0',  # a pickle's first bytes
    lambda data: b'',
    lambda data: data[:-1],
    lambda data: data[:9] + bytes([data[9] ^ 1]) + data[10:],
    lambda data: 'text',
    *(lambda data, text=text: zlib.compress(text) for text in TEXTS),
    lambda data: zlib.compress(zlib.decompress(data).replace(b'<f4', b'<f8')),
    lambda data: zlib.compress(zlib.decompress(data).replace(b'"tag"', b'"tags"')),
  ],
)
def test_what_cannot_be_read_is_lost_and_told(damage, tmp_path, caplog):
  database = opened(tmp_path)
  fill(database, range(3))
  with sqlite3.connect(tmp_path / 'store.db') as raw:
    table = 'jaxrl_payloads'
    query = f'select data from {table} where group_id = 2'
    (data,) = raw.execute(query).fetchone()
    assert damage(data) != data
    raw.execute(f'update {table} set data = ? where group_id = 2', [damage(data)])
  source = reader(database)
  source.begin()
  assert drawn(source, 0, 2) == [0, 2]
  assert 'group 2 of run one cannot be read and is left out' in caplog.text


def _write(folder, run):
  fill(StoreDatabase(url(folder)), range(20), run=run)


@pytest.mark.slow
def test_several_explorers_write_at_once(tmp_path):
  context = multiprocessing.get_context('spawn')
  runs = [context.Process(target=_write, args=(tmp_path, f'run{i}')) for i in range(2)]
  for process in runs:
    process.start()
  for process in runs:
    process.join(120)
    assert process.exitcode == 0
  source = reader(opened(tmp_path))
  source.begin()
  assert sorted(drawn(source, 0, 40)) == sorted([*range(20)] * 2)


@pytest.mark.parametrize(
  'text, message',
  [
    ('store(url="sqlite:////x.db", uses=0)', 'uses=0 must be at least 1'),
    ('store(url="sqlite:////x.db", use=1)', "Did you mean 'uses'"),
    ('store(uses=2)', 'name the store'),
    ('stor(uses=2)', "Did you mean 'store'"),
    ('store(url="x", wait=-1.0)', 'wait=-1.0'),
    ('store(url="x", reader="")', 'reader'),
  ],
)
def test_wrong_call_strings_are_told(text, message):
  where = r'dataset\.experience_store='
  with pytest.raises(ConfigError, match=where) as error:
    parse_store_options(text, store_options.ReaderOptions, 'dataset.experience_store')
  assert message in str(error.value)


def test_what_names_a_store():
  for text in ('experience+sqlite:////x.db', "store(url='sqlite:////x.db')"):
    assert store_options.is_store_path(text)
    assert (
      parse_store_options(text, store_options.WriterOptions, 'trajectory_dump.path').url
      == 'sqlite:////x.db'
    )
  plain = parse_store_options(
    'postgresql://h/n', store_options.ReaderOptions, 'dataset.experience_store'
  )
  assert plain == store_options.ReaderOptions(
    url='postgresql://h/n', uses=1, reader='trainer', wait=600.0
  )
  for text in ('', 's3://bucket/x.parquet', 'runs/store', 'odps://p/tables/t/ds=x'):
    assert not store_options.is_store_path(text)


@pytest.mark.parametrize(
  'name, message',
  [
    ('sqlite://', 'names no file'),
    ('sqlite:////nowhere/at/all/x.db', 'unable to open'),
    ('no url', 'not a URL'),
    ('sqlit:///x.db', 'cannot be opened'),
    ('postgresql+nodriver://user:secret@h/n', 'cannot be opened'),
  ],
)
def test_what_cannot_be_opened_is_told(name, message):
  with pytest.raises(ValueError, match=message) as error:
    StoreDatabase(name)
  assert 'secret' not in str(error.value)


def test_other_files_and_other_schemas_are_refused(tmp_path):
  database = opened(tmp_path)
  database.close()
  assert opened(tmp_path).id == database.id
  with sqlite3.connect(tmp_path / 'store.db') as raw:
    raw.execute("update jaxrl_store set value = '2' where name = 'schema'")
  with pytest.raises(ValueError, match='schema 2; this program reads schema 1'):
    opened(tmp_path)
  (tmp_path / 'store.db').write_text('no database at all' * 100)
  with pytest.raises(ValueError, match='not a database'):
    opened(tmp_path)


def test_a_damaged_store_is_one_line(tmp_path):
  """SQLite finds a damaged page when it reads it, perhaps in the middle of a run."""
  address = f'sqlite:///{tmp_path / "broken.db"}'
  database = StoreDatabase(address)
  database.close()
  content = bytearray((tmp_path / 'broken.db').read_bytes())
  content[100:] = b'\xff' * (len(content) - 100)
  (tmp_path / 'broken.db').write_bytes(bytes(content))
  for suffix in ('-wal', '-shm'):
    (tmp_path / f'broken.db{suffix}').unlink(missing_ok=True)
  with pytest.raises(ValueError, match=r'broken\.db') as error:
    StoreDatabase(address)
  assert '\n' not in str(error.value) and 'restore it from a copy' in str(error.value)
