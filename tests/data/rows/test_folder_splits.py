"""Which files of a folder belong to a split, in the layouts that people have."""

import json

import pytest

from jaxrl.data.row_sources import load_rows
from jaxrl.data.rows.folder_splits import choose_files, list_row_files
from jaxrl.data.rows.row_readers import DataError

GSM8K = [
  '.gitattributes',
  'README.md',
  *(f'{config}/{split}-00000-of-00001.parquet' for config in ('main', 'socratic')
    for split in ('test', 'train')),
]  # fmt: skip
GSM8K_README = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
  - split: test
    path: socratic/test-*
---
# GSM8K
"""
ULTRACHAT = [
  f'data/{name}-00000-of-00003-a3ecf92756993583.parquet'.replace(
    '-a3ecf92756993583', ''
  )
  for name in ('test_gen', 'test_sft', 'train_gen', 'train_sft')
]


def choose(paths, split='train', part='', readme=''):
  return choose_files(paths, readme, split, part, 'folder')


@pytest.mark.parametrize(
  ('paths', 'split', 'chosen'),
  [
    (['train/x.jsonl', 'test/x.jsonl'], 'train', ['train/x.jsonl']),
    (['train/x.jsonl', 'test/x.jsonl'], 'test', ['test/x.jsonl']),
    (['train.jsonl', 'constraints.jsonl'], 'train', ['train.jsonl']),
    (['train.jsonl', 'pretrain.jsonl', 'contest.csv'], 'train', ['train.jsonl']),
    (['train.jsonl', 'latest.jsonl', 'test.jsonl'], 'test', ['test.jsonl']),
    (['foo_train.jsonl', 'foo_test.jsonl'], 'train', ['foo_train.jsonl']),
    (['foo-train-v2.jsonl', 'foo-dev-v2.jsonl'], 'validation', ['foo-dev-v2.jsonl']),
    (
      [f'data/train-0000{i}-of-00002.parquet' for i in (0, 1)]
      + ['data/test-00000-of-00001.parquet'],
      'train',
      [f'data/train-0000{i}-of-00002.parquet' for i in (0, 1)],
    ),
    (['train.parquet', 'val.parquet'], 'validation', ['val.parquet']),
    (['train.parquet', 'valid.parquet'], 'val', ['valid.parquet']),
    (['train.parquet', 'dev.parquet'], 'validation', ['dev.parquet']),
    (['TRAIN.CSV', 'TEST.CSV'], 'test', ['TEST.CSV']),
    (['train.jsonl.gz', 'test.jsonl.gz'], 'test', ['test.jsonl.gz']),
    (['training/a.csv', 'evaluation/a.csv'], 'test', ['evaluation/a.csv']),
    (['train_0.jsonl', 'train_1.jsonl'], 'train', ['train_0.jsonl', 'train_1.jsonl']),
    (['train.jsonl', 'train_small.jsonl'], 'train', ['train.jsonl']),
    (['train/a/0.jsonl', 'test/a/0.jsonl'], 'train', ['train/a/0.jsonl']),
    (['train/0.csv', 'train/1.csv'], 'train', ['train/0.csv', 'train/1.csv']),
    (['train.jsonl', 'rows.jsonl'], 'train', ['train.jsonl']),
    # No path names a split: the rows are of any.
    (['a.jsonl', 'b.jsonl'], 'train', ['a.jsonl', 'b.jsonl']),
    (['a.jsonl', 'b.jsonl'], 'test', ['a.jsonl', 'b.jsonl']),
    (['constraints.jsonl'], 'train', ['constraints.jsonl']),
    # Splits of other names.
    (ULTRACHAT, 'train_sft', [ULTRACHAT[3]]),
    (['data/train_sft-00000-of-1.csv'], 'train', ['data/train_sft-00000-of-1.csv']),
    # Descriptions and hidden files hold no rows.
    (
      [
        *('README.json', 'dataset_infos.json', 'dataset_info.json', 'state.json'),
        *('metadata.jsonl', '.cache/train.jsonl', '_old/train.csv', 'train.jsonl'),
      ],
      'train',
      ['train.jsonl'],
    ),
    (['data/metadata.csv', 'data/rows.csv'], 'train', ['data/rows.csv']),
  ],
)  # fmt: skip
def test_files_of_a_split(paths, split, chosen):
  assert choose(paths, split) == chosen


@pytest.mark.parametrize(
  ('paths', 'split', 'words'),
  [
    (['train.jsonl', 'val.jsonl'], 'test', ["no split 'test'", 'train, validation']),
    (['test.csv'], 'train', ["no split 'train'", 'it has test']),
    (ULTRACHAT, 'train', ['more than one split', 'train_gen, train_sft']),
    (ULTRACHAT, 'validation', ["no split 'validation'", 'test_gen']),
    (GSM8K, 'train', ['several data sets (main, socratic)', 'folder:main']),
    (['a/x.jsonl', 'b/x.jsonl'], 'train', ['several data sets (a, b)']),
    (['x.jsonl', 'b/x.jsonl'], 'train', ['its own files, b', 'folder:b']),
    (['dataset_infos.json', 'README.md'], 'train', ['holds no .jsonl']),
  ],
)
def test_what_is_not_clear_is_refused(paths, split, words):
  with pytest.raises(DataError) as caught:
    choose(paths, split)
  for word in words:
    assert word in str(caught.value)


def test_configurations_of_a_readme():
  with pytest.raises(DataError, match=r'\(main, socratic\)'):
    choose(GSM8K, 'train', readme=GSM8K_README)
  for split in ('train', 'test'):
    for part in ('main', 'socratic'):
      wanted = [f'{part}/{split}-00000-of-00001.parquet']
      assert choose(GSM8K, split, part, GSM8K_README) == wanted
      assert choose(GSM8K, split, part) == wanted  # by the names of folders
  with pytest.raises(DataError, match="no split 'validation'"):
    choose(GSM8K, 'validation', 'main', GSM8K_README)
  with pytest.raises(DataError, match="no part 'mian': it has main, socratic"):
    choose(GSM8K, 'train', 'mian', GSM8K_README)
  default = GSM8K_README.replace('name: socratic', 'name: socratic\n  default: true')
  assert choose(GSM8K, 'test', readme=default) == [GSM8K[4]]


@pytest.mark.parametrize(
  ('data_files', 'split', 'chosen'),
  [
    ('"*.csv"', 'train', ['a.csv', 'b.csv']),
    ('a.csv', 'train', ['a.csv']),
    ('[a.csv, b.csv]', 'test', ['a.csv', 'b.csv']),
    ('\n  - {split: s, path: [a.csv]}\n  - {split: t, path: b.csv}', 't', ['b.csv']),
    ('\n    train: "a.*"\n    dev: "**/b.csv"', 'validation', ['b.csv']),
  ],
)  # fmt: skip
def test_ways_to_write_data_files(data_files, split, chosen):
  readme = f'---\nconfigs:\n- config_name: default\n  data_files: {data_files}\n---\n'
  paths = ['README.md', 'a.csv', 'b.csv', 'c.jsonl']
  assert choose(paths, split, readme=readme) == chosen


def test_a_broken_readme_says_nothing():
  for readme in ('---\n: [\n---\n', '---\nconfigs: 3\n---\n', '# Title', '---\na: 1\n'):
    assert choose(['train.csv'], readme=readme) == ['train.csv']


def test_one_file_of_a_folder():
  assert choose(GSM8K, 'test', GSM8K[2]) == [GSM8K[2]]


def test_what_may_hold_rows():
  names = ['a.JSONL', 'b.json.gz', 'c.txt', 'd.zip', 'config.json', 'e.parquet.zst']
  assert list_row_files(names) == ['a.JSONL', 'b.json.gz', 'e.parquet.zst']


# ---- Folders on disk


def write(folder, **files):
  for name, rows in files.items():
    path = folder / name.replace('__', '/')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix('.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  return str(folder)


def test_folders_for_training_and_test_do_not_mix(tmp_path):
  folder = write(tmp_path, train__a=[{'n': 1}], test__a=[{'n': 2}])
  assert load_rows(folder) == [{'n': 1}]
  assert load_rows(folder, 'test') == [{'n': 2}]
  assert load_rows(f'{folder}:test') == [{'n': 2}]
  with pytest.raises(DataError, match="no split 'validation'; it has test, train"):
    load_rows(folder, 'validation')


def saved(folder, rows, split=None):
  """Writes what `datasets.Dataset.save_to_disk` does."""
  pa = pytest.importorskip('pyarrow')
  folder.mkdir(parents=True)
  table = pa.Table.from_pylist(rows)
  name = 'data-00000-of-00001.arrow'
  sink = pa.OSFile(str(folder / name), 'wb')
  with sink, pa.ipc.new_stream(sink, table.schema) as writer:
    writer.write_table(table)
  state = {'_data_files': [{'filename': name}], '_split': split}
  (folder / 'state.json').write_text(json.dumps(state))
  (folder / 'dataset_info.json').write_text('{"features": {}}')


def test_a_folder_of_save_to_disk(tmp_path):
  saved(tmp_path / 'plain', [{'n': 1}, {'n': 2}])
  assert load_rows(str(tmp_path / 'plain'), limit=1) == [{'n': 1}]
  for split, n in (('train', 1), ('test', 2)):
    saved(tmp_path / 'splits' / split, [{'n': n}], split)
  description = {'splits': ['train', 'test']}
  (tmp_path / 'splits' / 'dataset_dict.json').write_text(json.dumps(description))
  assert load_rows(str(tmp_path / 'splits'), 'test') == [{'n': 2}]
  with pytest.raises(DataError, match="no split 'validation'; it has test, train"):
    load_rows(str(tmp_path / 'splits'), 'validation')
  with pytest.raises(DataError, match="no split 'test'; it has train"):
    load_rows(str(tmp_path / 'splits' / 'train'), 'test')
