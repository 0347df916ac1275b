"""Files as people have them are read, or refused in one line that names the place."""

import bz2
import concurrent.futures
import csv
import gzip
import json
import lzma
from pathlib import Path

import pytest

from jaxrl.data.row_sources import describe_row, get_field, has_field, load_rows
from jaxrl.data.rows.row_readers import DataError, read_file

ROWS = [{'question': f'q{i}, "ü"', 'answer': f'{i}'} for i in range(3)]
LINES = '\n'.join(map(json.dumps, ROWS))
CSV = 'question,answer\n' + ''.join(f'"q{i}, ""ü""",{i}\n' for i in range(3))
PRETTY = json.dumps(ROWS, indent=2, ensure_ascii=False)


def zst(data):
  pa = pytest.importorskip('pyarrow')
  return pa.compress(data, codec='zstd', asbytes=True)


PACKERS = {
  '.gz': gzip.compress,
  '.bz2': bz2.compress,
  '.xz': lzma.compress,
  '.zst': zst,
}


def put(tmp_path, name, text, encoding='utf-8'):
  path = tmp_path / name
  path.write_bytes(text.encode(encoding) if isinstance(text, str) else text)
  return str(path)


@pytest.mark.parametrize(
  ('name', 'text'),
  [
    ('x.jsonl', LINES),  # no newline at the end
    ('x.jsonl', LINES.replace('\n', '\r\n') + '\r\n\r\n'),
    ('x.JSONL', LINES),
    ('x.ndjson', LINES),
    ('x.json', LINES),  # lines under the wrong name
    ('x.jsonl', PRETTY),  # and the other way round
    ('x.jsonl', json.dumps(ROWS)),
    ('x.json', PRETTY),
    ('x.json', PRETTY.replace('\n', '\r\n')),
    ('x.json', '\n'.join(json.dumps(row, indent=1) for row in ROWS)),
    ('x.json', json.dumps({'version': 1, 'data': ROWS})),
    ('x.json', json.dumps({'tags': [], 'data': ROWS, 'other': [{}]})),
    ('x.json', json.dumps({'problems': ROWS}, indent=1)),
    ('x.csv', CSV),
    ('x.CSV', CSV.replace('\n', '\r\n')),
    ('x.csv', CSV.replace(',a', ';a').replace('",', '";')),
    ('x.csv', CSV.replace(',a', '\ta').replace('",', '"\t')),
    ('x.csv', 'sep=;\n' + CSV.replace(',a', ';a').replace('",', '";')),
    ('x.csv', CSV.replace('question,', ' question , ')),
    ('x.tsv', CSV.replace(',a', '\ta').replace('",', '"\t')),
  ],
)
def test_texts_as_people_have_them(tmp_path, name, text):
  assert load_rows(put(tmp_path, name, text)) == ROWS
  for encoding in ('utf-8-sig', 'utf-16', 'utf-16-le', 'utf-16-be', 'utf-32'):
    assert load_rows(put(tmp_path, name, text, encoding)) == ROWS
  for suffix, pack in PACKERS.items():
    packed = put(tmp_path, name + suffix, pack(text.encode()))
    assert load_rows(packed) == ROWS
    assert load_rows(packed, limit=2) == ROWS[:2]


def test_one_object_is_one_row(tmp_path):
  row = {'messages': [{'role': 'user', 'content': 'a'}], 'tools': [{'name': 'b'}]}
  assert load_rows(put(tmp_path, 'x.json', json.dumps(row, indent=1))) == [row]
  row = {'question': 'a', 'choices': ['b', 'c']}
  assert load_rows(put(tmp_path, 'x.json', json.dumps(row))) == [row]


def test_long_cells_and_many_columns(tmp_path):
  long = 'x' * 300_000
  for name, separator in (('x.csv', ','), ('x.tsv', '\t')):
    text = separator.join(['question', 'answer']) + f'\n{long}{separator}1\n'
    assert load_rows(put(tmp_path, name, text)) == [{'question': long, 'answer': '1'}]


def test_other_tables_of_the_process_keep_their_limit(tmp_path):
  """Also between two rows, after an error, and while other threads read."""
  limit, long = csv.field_size_limit(), 'x' * 300_000

  def check():
    assert csv.field_size_limit() == limit
    with pytest.raises(csv.Error, match='field larger than field limit'):
      next(csv.reader([long]))

  path = Path(put(tmp_path, 'x.csv', 'question,answer\n' + f'{long},1\n' * 40))
  for _ in read_file(path):
    check()
  unread = iter(read_file(path))
  next(unread)
  check()
  bad = put(tmp_path, 'y.csv', f'question,answer\n{long},1\n{long}\n')
  with pytest.raises(DataError):
    load_rows(bad)
  check()
  with concurrent.futures.ThreadPoolExecutor(4) as threads:
    counts = list(threads.map(lambda _: len(list(read_file(path))), range(8)))
  assert counts == [40] * 8
  check()


def test_a_parquet_file_may_be_compressed_and_shouted(tmp_path):
  parquet = pytest.importorskip('pyarrow.parquet')
  import pyarrow

  plain = tmp_path / 'x.PARQUET'
  parquet.write_table(pyarrow.Table.from_pylist(ROWS), plain)
  assert load_rows(str(plain)) == ROWS
  packed = put(tmp_path, 'y.parquet.gz', gzip.compress(plain.read_bytes()))
  assert load_rows(packed) == ROWS


@pytest.mark.parametrize(
  ('name', 'text', 'words'),
  [
    ('x.jsonl', LINES + '\n{"a": ', ['x.jsonl, line 4', 'not valid JSON']),
    ('x.jsonl', '{"a": 1}\n{"a": 1}}\n', ['x.jsonl, line 2, column 9']),
    ('x.json', LINES + '\n{"a": ', ['x.json, line 4', 'not valid JSON']),
    ('x.json', PRETTY[:-3], ['x.json, line', 'not valid JSON']),
    ('x.json', '"text"', ['must hold a list']),
    ('x.json', '{"a": [{}], "b": [{}]}', ['several lists of rows (a, b)']),
    ('x.json', '{"question": ["a", "b"], "answer": ["1", "2"]}', ['holds columns']),
    ('x.json', '{"q": {"0": "a"}, "a": {"0": "b"}}', ['columns (q, a)']),
    ('x.csv', 'a,b\n1,"2\n3,4\n', ['x.csv, line 2', 'not a valid table']),
    ('x.csv', 'a,b\n1,"he said "no""\n', ['x.csv, line 2', 'written twice']),
    ('x.csv', 'a,b\n1,2\n\n3\n', ['x.csv, line 4', '2 columns', 'but 1']),
    ('x.csv', 'a,b,a\n1,2,3\n', ["the header has 'a' twice"]),
    ('x.tsv', 'a\tb\n1\t2\t3\n', ['x.tsv, line 2', '2 columns']),
    ('x.jsonl', b'{"a": "b"}\n{"a": "\xe4"}\n', ['line 2: not UTF-8', '0xe4']),
    ('x.csv', b'a,b\n1,2\n3,\xe4\n', ['line 3: not UTF-8', 'save the file as UTF-8']),
    (
      'x.jsonl.gz',
      gzip.compress(LINES.encode(), mtime=0)[:-12],
      ['x.jsonl.gz: damaged .gz'],
    ),
    ('x.jsonl.gz', b'{"a": 1}\n', ['x.jsonl.gz cannot be read', 'gzip']),
    ('x.jsonl.xz', lzma.compress(LINES.encode())[:-30], ['x.jsonl.xz: damaged .xz']),
    ('x.jsonl.bz2', bz2.compress(LINES.encode())[:-9], ['x.jsonl.bz2: damaged .bz2']),
    ('x.jsonl.zst', b'no', ['x.jsonl.zst']),
    ('x.zip', b'PK', ['unknown kind of file', '.jsonl', '.gz']),
    ('x.jsonl.zip', b'PK', ['unknown kind of file']),
    ('x', b'{}', ['unknown kind of file']),
    ('x.arrow', b'ARROW1xx', ['x.arrow: not an Arrow file']),
    ('x.csv', '', ['is empty']),
    ('x.csv', 'question,answer\n', ['is empty']),
    ('x.json', ' \n', ['is empty']),
  ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, name, text, words):
  with pytest.raises(DataError) as caught:
    load_rows(put(tmp_path, name, text))
  for word in words:
    assert word in str(caught.value)
  assert '\n' not in str(caught.value)


def test_a_row_is_named_by_its_file(tmp_path):
  put(tmp_path, 'a.jsonl', '{"n": 0}\n{"n": 1}')
  put(tmp_path, 'b.jsonl', '{"n": 2}')
  rows = load_rows(str(tmp_path))
  names = [describe_row(rows, i, 'rows') for i in range(3)]
  places = [('a', 0), ('a', 1), ('b', 0)]
  assert names == [f'{tmp_path}/{file}.jsonl, row {n}' for file, n in places]
  mixed = load_rows((f'{tmp_path}/b.jsonl', f'{tmp_path}/a.jsonl'))
  assert describe_row(mixed, 2, '').endswith('a.jsonl, row 1')
  assert describe_row([{}], 0, 'rows') == 'rows, row 0'


def test_fields_within_fields():
  row = {'a': {'b': {'c': 1}, 'd': None}, 'a.d': 2, 'text': '{"x": {"y": 3}}', 'n': 1}
  found = [
    get_field(row, key, '-') for key in ('a.b.c', 'a.d', 'text.x.y', 'a.x', 'n.m')
  ]
  assert found == [1, 2, 3, '-', '-']
  assert has_field(row, 'a.b') and not has_field(row, 'b')
  assert has_field({'a': {'d': None}}, 'a.d')
