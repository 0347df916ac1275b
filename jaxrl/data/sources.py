"""Rows from files, folders, Hugging Face datasets on disk, and generators."""

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxrl import signature

Row = dict[str, Any]
# Called as fn(split, **options), with `size` among the options.
GENERATORS = {
  'arithmetic': 'jaxrl.data.problems:arithmetic',
  'frozen_lake': 'jaxrl.envs.frozen_lake:demonstrations',
}


class DataError(signature.ConfigError):
  """Says which file, where in it, and what is wrong."""


def load_rows(path: str, split: str = 'train', limit: int | None = None) -> list[Row]:
  """All rows of a source, at most `limit` of them.

  path: a .jsonl, .json, .csv or .parquet file; a folder of such files (read in the
  order of their names; if names hold the split's name, only those); a folder written
  by Hugging Face's `save_to_disk`; or `generate:name(option=value)`, where `limit`
  is the number to generate and name one of GENERATORS or `package.module:function`.
  Raises DataError with file and line.
  """
  if path.startswith('generate:'):
    return _generate(path, split, limit)
  place = Path(path).expanduser()
  if not place.exists():
    raise DataError(f'dataset {path!r} does not exist (looked in {Path.cwd()})')
  rows = _read_folder(place, split) if place.is_dir() else _read_file(place)
  rows = rows if limit is None else rows[:limit]
  if not rows:
    raise DataError(f'dataset {path!r} is empty: it holds no rows')
  return rows


def _generate(path: str, split: str, limit: int | None) -> list[Row]:
  name, options = signature.parse_call(path.removeprefix('generate:'))
  where = f'dataset {path!r}'
  if name not in GENERATORS and ':' not in name:
    raise signature.unknown(name, GENERATORS, 'generator', where)
  generate = signature.resolve(GENERATORS.get(name, name))
  signature.check_options(generate, options, where)
  if limit is not None:
    options['size'] = limit
  try:
    return generate(split, **options)
  except ValueError as error:
    raise DataError(f'{where}: {error}') from error


def _read_folder(folder: Path, split: str) -> list[Row]:
  if (folder / 'dataset_dict.json').exists() or (folder / 'state.json').exists():
    return _read_huggingface(folder, split)
  files = sorted(f for f in folder.rglob('*') if f.suffix in READERS)
  named = [f for f in files if split in f.stem]
  if not files:
    raise DataError(f'folder {folder} holds no {", ".join(READERS)} file')
  return [row for file in named or files for row in _read_file(file)]


def _read_huggingface(folder: Path, split: str) -> list[Row]:
  try:
    import datasets  # pyright: ignore[reportMissingImports]
  except ImportError as error:
    raise DataError(
      f'{folder} is a Hugging Face dataset; install `datasets` to read it'
    ) from error
  loaded = datasets.load_from_disk(str(folder))
  if isinstance(loaded, datasets.DatasetDict):
    if split not in loaded:
      raise DataError(f'{folder} has no split {split!r}; it has {", ".join(loaded)}')
    loaded = loaded[split]
  return [dict(row) for row in loaded]


def _read_file(file: Path) -> list[Row]:
  if file.suffix not in READERS:
    raise DataError(f'{file}: unknown kind of file; known are {", ".join(READERS)}')
  try:
    return list(READERS[file.suffix](file))
  except UnicodeDecodeError as error:
    raise DataError(f'{file}: not UTF-8 text: {error}') from error


def _read_jsonl(file: Path) -> Iterator[Row]:
  with file.open(encoding='utf-8') as lines:
    for number, line in enumerate(lines, 1):
      if line.strip():
        yield _parse(line, f'{file}, line {number}')


def _parse(text: str, where: str) -> Row:
  try:
    row = json.loads(text)
  except json.JSONDecodeError as error:
    raise DataError(f'{where}: not valid JSON: {error}') from error
  if not isinstance(row, dict):
    raise DataError(f'{where}: a row must be an object, not {type(row).__name__}')
  return row


def _read_json(file: Path) -> Iterator[Row]:
  text = file.read_text(encoding='utf-8')
  try:
    rows = json.loads(text)
  except json.JSONDecodeError as error:
    raise DataError(f'{file}, line {error.lineno}: not valid JSON: {error}') from error
  if isinstance(rows, dict):  # {'data': [...]} or one of its like
    lists = [value for value in rows.values() if isinstance(value, list)]
    rows = lists[0] if len(lists) == 1 else [rows]
  if not isinstance(rows, list):
    raise DataError(f'{file}: must hold a list of objects')
  for i, row in enumerate(rows):
    if not isinstance(row, dict):
      raise DataError(f'{file}, row {i}: must be an object, not {type(row).__name__}')
    yield row


def _read_csv(file: Path) -> Iterator[Row]:
  with file.open(encoding='utf-8', newline='') as lines:
    reader = csv.DictReader(lines)
    for row in reader:
      if None in row or None in row.values():
        raise DataError(
          f'{file}, line {reader.line_num}: the row does not have the '
          f'{len(reader.fieldnames or [])} columns of the header'
        )
      yield row


def _read_parquet(file: Path) -> Iterator[Row]:
  try:
    import pyarrow.parquet
  except ImportError as error:
    raise DataError(f'{file}: install `pyarrow` to read Parquet files') from error
  try:
    yield from pyarrow.parquet.read_table(file).to_pylist()
  except pyarrow.ArrowInvalid as error:
    raise DataError(f'{file}: not a Parquet file: {error}') from error


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
  '.jsonl': _read_jsonl,
  '.json': _read_json,
  '.csv': _read_csv,
  '.parquet': _read_parquet,
}
