"""Parts as files: typed, whole, under the mode's name; wrong paths are told at once."""

import json

import fsspec
import pyarrow.parquet
import pytest

from jaxrl.data.trajectory_writers.file_writer import FileWriter

TYPES = {'n': 'int', 'x': 'double', 'ok': 'boolean', 'text': 'string'}
ROWS = [
  {'n': 1, 'x': 0.1, 'ok': True, 'text': 'ä\n"'},
  {'n': None, 'x': None, 'ok': None, 'text': None},
]


def test_json_lines_in_a_folder(tmp_path):
  sink = FileWriter(str(tmp_path / 'a' / 'b'), 'val', TYPES)
  sink.check(fresh=True)
  sink.write('t-00000', ROWS)
  sink.write('t-00000', ROWS)  # in its own place
  [file] = (tmp_path / 'a' / 'b').iterdir()
  assert file.name == 'val-t-00000.jsonl'
  assert [json.loads(line) for line in file.read_text().splitlines()] == ROWS


def test_parquet_holds_the_types(tmp_path):
  sink = FileWriter(f'{tmp_path}/math.parquet', 'train', TYPES)
  sink.check(fresh=True)
  sink.write('t-00001', ROWS)
  table = pyarrow.parquet.read_table(tmp_path / 'math-train-t-00001.parquet')
  assert [str(f.type) for f in table.schema] == ['int32', 'double', 'bool', 'string']
  assert table.to_pylist() == ROWS


def test_an_fsspec_url():
  sink = FileWriter('memory://dumps/here', 'train', TYPES)
  sink.check(fresh=True)
  sink.write('t-00000', ROWS)
  data = fsspec.filesystem('memory').cat('/dumps/here/train-t-00000.jsonl')
  assert len(data.splitlines()) == 2


def test_parts_of_another_run_are_not_written_over(tmp_path):
  FileWriter(str(tmp_path), 'train', TYPES).write('t-00000', ROWS)
  with pytest.raises(ValueError, match='of another run'):
    FileWriter(str(tmp_path), 'train', TYPES).check(fresh=True)
  FileWriter(str(tmp_path), 'train', TYPES).check(fresh=False)
  FileWriter(str(tmp_path), 'val', TYPES).check(fresh=True)


@pytest.mark.parametrize(
  'path, message',
  [
    ('', 'trajectory_dump.path is empty: set it'),
    ('memry://x', "no scheme 'memry'. Did you mean 'memory'"),
    ('x/y.csv', "no format 'csv'.*jsonl, parquet"),
  ],
)
def test_a_wrong_path(path, message):
  with pytest.raises(ValueError, match=message):
    FileWriter(path, 'train', TYPES)


def test_a_place_that_cannot_be_written_to(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(ValueError, match='cannot write there'):
    FileWriter(str(tmp_path / 'file' / 'below'), 'train', TYPES).check(fresh=True)
