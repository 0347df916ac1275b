"""Sources of rows: every kind of file reads the same, every fault names its place."""

import csv
import json
import pathlib
from pathlib import Path

import pytest

from jaxrl.data.row_sources import DataError
from jaxrl.options import ConfigError
from tests.calls import load_rows

ROWS = [{'question': f'q{i}, "ü"\n?', 'answer': f'{i}'} for i in range(4)]
SHARED = Path(__file__).parents[3] / 'shared' / 'data'


def write(path, rows=ROWS):
  if path.suffix == '.jsonl':
    path.write_text('\n'.join(json.dumps(r) for r in rows) + '\n\n')
  elif path.suffix == '.json':
    path.write_text(json.dumps(rows))
  elif path.suffix == '.csv':
    with path.open('w', newline='') as file:
      writer = csv.DictWriter(file, rows[0])
      writer.writeheader()
      writer.writerows(rows)
  else:
    parquet = pytest.importorskip('pyarrow.parquet')
    import pyarrow

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
  return str(path)


@pytest.mark.parametrize('suffix', ['jsonl', 'json', 'csv', 'parquet'])
def test_every_kind_of_file(tmp_path, suffix):
  path = write(tmp_path / f'data.{suffix}')
  assert load_rows(path) == ROWS
  assert load_rows(path, limit=2) == ROWS[:2]


def test_a_json_object_that_holds_one_list(tmp_path):
  path = tmp_path / 'data.json'
  path.write_text(json.dumps({'version': 1, 'data': ROWS}))
  assert load_rows(str(path)) == ROWS


def test_a_folder_in_the_order_of_names_and_by_split(tmp_path):
  write(tmp_path / 'b.jsonl', ROWS[2:])
  write(tmp_path / 'a.csv', ROWS[:2])
  (tmp_path / 'README.md').write_text('not data')
  assert load_rows(str(tmp_path)) == ROWS
  write(tmp_path / 'test-0.jsonl', ROWS[3:])
  assert load_rows(str(tmp_path), 'test') == ROWS[3:]


LAYOUTS = {
  'folders': ('train/a.jsonl', 'test/a.jsonl'),
  'as on the Hub': (
    'data/train-00000-of-00001.parquet',
    'data/test-00000-of-00001.parquet',
  ),
  'a prefix': ('gsm8k_train.jsonl', 'gsm8k_test.jsonl'),
  'a config': ('main/train-00000.parquet', 'main/test-00000.parquet'),
  'letters': ('Train.JSONL', 'TEST.JSONL'),
  'packed': ('train.jsonl', 'test.csv'),
}


@pytest.mark.parametrize('train, test', LAYOUTS.values(), ids=LAYOUTS)
def test_a_split_is_found_by_whole_words_of_the_path(tmp_path, train, test):
  for name, rows in ((train, ROWS[:2]), (test, ROWS[2:])):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    made = write((tmp_path / name).with_suffix((tmp_path / name).suffix.lower()), rows)
    pathlib.Path(made).rename(tmp_path / name)
  for beside in ('dataset_infos.json', 'constraints.jsonl', '.cache.jsonl'):
    (tmp_path / beside).write_text('{"a": 1}')
  assert load_rows(str(tmp_path), 'train') == ROWS[:2]
  assert load_rows(str(tmp_path), 'test') == ROWS[2:]
  with pytest.raises(DataError, match="no split 'validation'; it has test, train"):
    load_rows(str(tmp_path), 'validation')


def test_names_of_validation_are_one_split(tmp_path):
  write(tmp_path / 'dev.jsonl', ROWS[:1])
  write(tmp_path / 'train.jsonl', ROWS[1:])
  for name in ('validation', 'val', 'dev', 'valid'):
    assert load_rows(str(tmp_path), name) == ROWS[:1]


def test_data_sets_beside_each_other_are_not_merged(tmp_path):
  for config in ('main', 'socratic'):
    (tmp_path / config).mkdir()
    write(tmp_path / config / 'train-0.jsonl')
  with pytest.raises(DataError, match=r'\(main, socratic\).*name one'):
    load_rows(str(tmp_path), 'train')
  assert load_rows(str(tmp_path / 'main'), 'train') == ROWS


@pytest.mark.parametrize('separator', [',', ';', '\t', '|'])
@pytest.mark.parametrize('suffix', ['csv', 'tsv', 'CSV'])
def test_columns_have_any_usual_separator(tmp_path, suffix, separator):
  path = tmp_path / f'rows.{suffix}'
  path.write_text(f'question{separator}answer\n1+1?{separator}2\n')
  assert load_rows(str(path)) == [{'question': '1+1?', 'answer': '2'}]


def test_a_hugging_face_dataset_on_disk(tmp_path):
  datasets = pytest.importorskip('datasets')
  dataset = datasets.Dataset.from_list(ROWS)
  dataset.save_to_disk(tmp_path / 'plain')
  datasets.DatasetDict({'train': dataset}).save_to_disk(tmp_path / 'splits')
  assert load_rows(str(tmp_path / 'plain')) == ROWS
  assert load_rows(str(tmp_path / 'splits'), 'train') == ROWS
  with pytest.raises(DataError, match="no split 'test'; it has train"):
    load_rows(str(tmp_path / 'splits'), 'test')


@pytest.mark.parametrize(
  ('name', 'text', 'message'),
  [
    (
      'x.jsonl',
      '{"a": 1}\n\n{"a": \n',
      r'x\.jsonl, line 3, column 6: not valid JSON: E',
    ),
    ('x.jsonl', '{"a": 1}\n[1]\n', r'x\.jsonl, line 2: .* not list'),
    ('x.json', '[\n{"a": 1},\n{]', r'x\.json, line 3, column 2: not valid JSON: E'),
    ('x.json', '[{"a": 1}, 2]', r'x\.json, row 1: .* not int'),
    ('x.csv', 'a,b\n1,2\n3\n', r'x\.csv, line 3: .* 2 columns'),
    ('x.csv', 'a,b\n1,2,3\n', r'x\.csv, line 2: .* 2 columns'),
    ('x.parquet', 'PAR0', r'x\.parquet: not a Parquet file'),
    ('x.jsonl', '{"a": 1}\n' + '[' * 100_000, r'x\.jsonl, line 2: .*recursion'),
    (
      'x.jsonl',
      r'{"a": "\ud83d\ude00 \uD83D"}',
      r'x\.jsonl, line 1: .* surrogate pair',
    ),
    ('x.json', r'[{"a": "\ud800"}]', r'x\.json: .* surrogate pair'),
    ('x.jsonl', '{"a": ' + '9' * 5000 + '}', r'x\.jsonl, line 1: .*digits'),
    ('x.json', '[' * 100_000, r'x\.json: .*recursion'),
    ('x.txt', 'hello', r'x\.txt: unknown kind of file; known are \.jsonl'),
    ('x.jsonl', '\n\n', r'empty'),
    ('x.json', '[]', r'empty'),
  ],
)
def test_malformed_files_name_their_place(tmp_path, name, text, message):
  path = tmp_path / name
  path.write_text(text)
  with pytest.raises(DataError, match=message) as caught:
    load_rows(str(path))
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
  'name, text',
  [('x.jsonl', '{"a": "1"}'), ('x.json', '[{"a": "1"}]'), ('x.csv', 'a\n1')],
)
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path, name, text):
  (tmp_path / name).write_text(text + '\n', encoding='utf-8-sig')
  assert load_rows(str(tmp_path / name)) == [{'a': '1'}]


def test_text_that_is_not_utf8(tmp_path):
  path = tmp_path / 'x.jsonl'
  path.write_bytes(b'{"a": "\xff"}\n')
  with pytest.raises(DataError, match=r'x\.jsonl.*UTF-8'):
    load_rows(str(path))


def test_missing_files_and_empty_folders(tmp_path):
  with pytest.raises(DataError, match='does not exist'):
    load_rows(str(tmp_path / 'nothing.jsonl'))
  with pytest.raises(DataError, match=r'holds no \.jsonl'):
    load_rows(str(tmp_path))


def test_generators():
  rows = load_rows('generate:arithmetic', 'test', 7)
  assert len(rows) == 7
  assert load_rows("generate:arithmetic(kinds=('add',), size=3)")[0]['kind'] == 'add'
  assert load_rows('generate:jaxrl.data.arithmetic:arithmetic_rows(size=3)')
  demos = load_rows('generate:frozen_lake(noise=0.5)', limit=2)
  assert demos[0]['messages'][1]['role'] == 'assistant'
  with pytest.raises(ConfigError, match='arithmetic'):
    load_rows('generate:arithmetik')
  with pytest.raises(ConfigError, match='max_number'):
    load_rows('generate:arithmetic(max_numbers=3)')


@pytest.mark.skipif(not SHARED.exists(), reason='the shared data folder is not here')
def test_gsm8k_and_deepmath_as_given():
  assert len(load_rows(str(SHARED / 'gsm8k' / 'test.jsonl'))) == 1319
  assert len(load_rows(str(SHARED / 'gsm8k'), 'test')) == 1319
  assert 'ground_truth' in load_rows(str(SHARED / 'deepmath'))[0]


def test_a_damaged_parquet_file_is_one_line(tmp_path):
  """Bytes are flipped all over the file; whatever fails says which file it is."""
  parquet = pytest.importorskip('pyarrow.parquet')
  import pyarrow

  path = tmp_path / 'x.parquet'
  rows = [{'a': f'text {i}', 'b': i} for i in range(1000)]
  parquet.write_table(pyarrow.Table.from_pylist(rows), path)
  whole, failures = path.read_bytes(), 0
  for damaged in (
    whole[:-20],
    b'',
    *(whole[:i] + b'\xff' * 40 + whole[i + 40 :] for i in range(0, len(whole), 500)),
  ):
    path.write_bytes(damaged)
    try:
      load_rows(str(path))
    except DataError as error:
      failures += 1
      assert 'x.parquet' in str(error) and '\n' not in str(error)
  assert failures > 3
