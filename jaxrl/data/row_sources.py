"""Row sources: files, folders, Hugging Face datasets on disk, and generators."""

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxrl import call_strings
from jaxrl.call_strings import ComponentCall

Row = dict[str, Any]
# A file or folder; a call of a generator, see GENERATORS; or several of both.
RowSource = str | ComponentCall
RowSources = RowSource | tuple[RowSource, ...]
GENERATE_PREFIX = 'generate:'  # of a generator in a config
SOURCE_KEY = (
  'source_path'  # the key that holds the source of a row if there are several
)
# Called as fn(split, **options), with `size` among the options.
GENERATORS = {
  'arithmetic': 'jaxrl.data.arithmetic:arithmetic_rows',
  'frozen_lake': 'jaxrl.envs.games.frozen_lake_env:demonstrations',
  'picture_quiz': 'jaxrl.envs.games.picture_quiz_env:demonstrations',
}
# Files that lie beside rows and describe them.
METADATA_FILES = frozenset(
  'dataset_infos.json dataset_info.json dataset_dict.json state.json metadata.json '
  'package.json config.json croissant.json'.split()
)
# Names of splits, and what else these are called.
SPLITS = {
  **dict.fromkeys(('train', 'training'), 'train'),
  **dict.fromkeys(('validation', 'valid', 'val', 'dev'), 'validation'),
  **dict.fromkeys(('test', 'testing'), 'test'),
}


class DataError(call_strings.ConfigError):
  """Reports which file is wrong, where in it, and what to do."""


def load_rows(
  path: RowSources, split: str = 'train', limit: int | None = None
) -> list[Row]:
  """Loads all rows of a source, or its first `limit` without reading more.

  `limit` is divided evenly among several sources; each row then holds under SOURCE_KEY
  the text of the source that it came from.

  Args:
    path: A .jsonl, .json, .csv, .tsv or .parquet file, all but the last perhaps
      compressed (.gz, .bz2, .xz, .zst); a folder of such files, read in the order of
      their names (only those whose path names the split, if any names one);
      a folder written by Hugging Face's `save_to_disk`; the call of a generator, one of
      GENERATORS or `package.module:function`, of which `limit` is the number of rows;
      or a tuple of such sources.
    split: The split to load.
    limit: The maximum number of rows.

  Returns:
    The rows.

  Raises:
    DataError: If the source is missing, empty or malformed; the error names file and
      line.
  """
  if limit is not None and limit < 1:
    where = f'limit={limit} of dataset {describe_sources(path)!r}'
    raise DataError(f'{where} must be at least 1, or none')
  if isinstance(path, tuple):
    return _load_all(path, split, limit)
  if isinstance(path, ComponentCall):
    return _generate(path, split, limit)
  location = Path(path).expanduser()
  if not location.exists():
    hint = ''
    if path.startswith(GENERATE_PREFIX) or ' + ' in path:
      hint = '. In Python, several sources are a tuple, and a generator a ComponentCall'
    raise DataError(f'dataset {path!r} does not exist (looked in {Path.cwd()}){hint}')
  rows_iterator = (
    _read_folder(location, split) if location.is_dir() else _read_file(location)
  )
  rows = list(itertools.islice(rows_iterator, limit))
  if not rows:
    raise DataError(f'dataset {path!r} is empty: it holds no rows')
  return rows


def describe_sources(path: RowSources) -> str:
  """Returns how messages name a source: as a config writes it."""
  return ' + '.join(map(str, path)) if isinstance(path, tuple) else str(path)


def _load_all(
  sources: tuple[RowSource, ...], split: str, limit: int | None
) -> list[Row]:
  if len(set(sources)) < len(sources):
    raise DataError(f'dataset {describe_sources(sources)!r} names a source twice')
  rows, count = [], len(sources)
  for i, source in enumerate(sources):
    share = None if limit is None else (limit + count - 1 - i) // count
    if share != 0:
      loaded = load_rows(source, split, share)
      rows += [{**row, SOURCE_KEY: str(source)} for row in loaded]
  return rows


def _generate(call: ComponentCall, split: str, limit: int | None) -> list[Row]:
  name, options, where = call.name, dict(call.options), f'dataset {str(call)!r}'
  if name not in GENERATORS and ':' not in name:
    raise call_strings.unknown_name_error(name, GENERATORS, 'generator', where)
  generate = call_strings.resolve(GENERATORS.get(name, name), where)
  call_strings.check_options(generate, options, where)
  if limit is not None:
    options['size'] = limit
  try:
    return generate(split, **options)
  except ValueError as error:
    raise DataError(f'{where}: {error}') from error


def _read_folder(folder: Path, split: str) -> Iterable[Row]:
  if (folder / 'dataset_dict.json').exists() or (folder / 'state.json').exists():
    return _read_huggingface(folder, split)
  files = sorted(f for f in folder.rglob('*') if _holds_rows(f))
  if not files:
    raise DataError(f'folder {folder} holds no {", ".join(FILE_READERS)} file')
  chosen = _files_of_split(folder, files, split)
  return itertools.chain.from_iterable(map(_read_file, chosen))


def _holds_rows(file: Path) -> bool:
  is_told = file.name.startswith('.') or file.name.lower() in METADATA_FILES
  return file.is_file() and _kind_of(file)[0] in FILE_READERS and not is_told


def _kind_of(file: Path) -> tuple[str, str]:
  """Returns the kinds of a file's content and of its compression, '' for none."""
  suffixes = [suffix.lower() for suffix in file.suffixes]
  packed = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else ''
  return (suffixes[-1] if suffixes else ''), packed


def _files_of_split(folder: Path, files: list[Path], split: str) -> list[Path]:
  """Returns the files of a split: those whose path has its name as a whole word.

  Without any file that names a split, all of them are of every split.

  Raises:
    DataError: If there are other splits alone, or several configs have this one.
  """
  places = {file: _find_split(file.relative_to(folder), split) for file in files}
  found = sorted({place[0] for place in places.values() if place is not None})
  if not found:
    return files
  chosen = {f: place for f, place in places.items() if place and place[0] == split}
  if not chosen:
    raise DataError(
      f'folder {folder} has no split {split!r}; it has {", ".join(found)}'
    )
  configs = sorted({'/'.join(config) or '.' for _, config in chosen.values()})
  if len(configs) > 1:
    raise DataError(
      f'folder {folder} holds several data sets with a split {split!r}, in '
      f'{", ".join(configs)}: name one of these folders'
    )
  return list(chosen)


def _find_split(path: Path, wanted: str) -> tuple[str, tuple[str, ...]] | None:
  """Returns the split that a path names, and the folders before that name."""
  parts = (*path.parts[:-1], path.name.partition('.')[0])
  of_wanted = _words(wanted)
  for i, part in enumerate(parts):
    words = _words(part)
    starts = range(len(words) - len(of_wanted) + 1)
    if any(words[start : start + len(of_wanted)] == of_wanted for start in starts):
      name = wanted
    else:
      names = [SPLITS[word] for word in words if word in SPLITS]
      if not names:
        continue
      name = wanted if SPLITS.get(wanted) == names[0] else names[0]
    return name, tuple(part for part in parts[:i] if part != 'data')
  return None


def _words(text: str) -> list[str]:
  return re.findall(r'[a-z0-9]+', text.lower())


def _read_huggingface(folder: Path, split: str) -> Iterable[Row]:
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
  return map(dict, loaded)


def _read_file(file: Path) -> Iterator[Row]:
  kind = _kind_of(file)[0]
  if kind not in FILE_READERS:
    raise DataError(
      f'{file}: unknown kind of file; known are {", ".join(FILE_READERS)}'
    )
  try:
    yield from FILE_READERS[kind](file)
  except UnicodeDecodeError as error:
    raise DataError(f'{file}: not UTF-8 text: {error}') from error
  except (OSError, EOFError, lzma.LZMAError) as error:
    what = getattr(error, 'strerror', None) or error
    raise DataError(f'{file} cannot be read: {what}') from error


def _open_zstd(file: Path, mode: str) -> Any:
  del mode
  import pyarrow

  return pyarrow.input_stream(str(file), compression='zstd')


def _open_text(file: Path, newline: str | None = None) -> io.TextIOWrapper:
  """Opens a text file, which may be compressed or in UTF-16."""
  opener: Callable[..., Any] = COMPRESSIONS.get(_kind_of(file)[1], open)
  with opener(file, 'rb') as head:
    start = head.read(2)
  encoding = 'utf-16' if start in (b'\xff\xfe', b'\xfe\xff') else 'utf-8-sig'
  return io.TextIOWrapper(opener(file, 'rb'), encoding=encoding, newline=newline)


def _read_jsonl(file: Path) -> Iterator[Row]:
  with _open_text(file) as lines:
    for number, line in enumerate(lines, 1):
      if line.strip():
        yield _parse(line, f'{file}, line {number}')


def _parse(text: str, where: str) -> Row:
  try:
    row = json.loads(text.rstrip())
  except json.JSONDecodeError as error:
    raise DataError(
      f'{where}, column {error.colno}: not valid JSON: {error.msg}'
    ) from error
  except (ValueError, RecursionError) as error:  # a number or a nesting too large
    raise DataError(f'{where}: JSON that cannot be read: {error}') from error
  _check_surrogates(text, row, where)
  if not isinstance(row, dict):
    raise DataError(f'{where}: a row must be an object, not {type(row).__name__}')
  return row


def _check_surrogates(text: str, value: Any, where: str) -> None:
  r"""Raises DataError for half a surrogate pair, such as \ud800, which is no text."""
  if r'\ud' not in text and r'\uD' not in text:
    return
  try:
    json.dumps(value, ensure_ascii=False).encode()
  except UnicodeEncodeError as error:
    letter = error.object[error.start]
    raise DataError(
      f'{where}: {letter!a} is half of a surrogate pair, which is no text'
    ) from error


def _read_json(file: Path) -> Iterator[Row]:
  with _open_text(file) as stream:
    text = stream.read()
  try:
    rows = json.loads(text)
  except json.JSONDecodeError as error:
    if error.msg == 'Extra data' and '\n' in text.strip():  # a row on each line
      yield from _read_jsonl(file)
      return
    raise DataError(
      f'{file}, line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}'
    ) from error
  except (ValueError, RecursionError) as error:
    raise DataError(f'{file}: JSON that cannot be read: {error}') from error
  _check_surrogates(text, rows, str(file))
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
  with _open_text(file, newline='') as lines:
    header = lines.readline()
    lines.seek(0)
    # What separates most columns; names with a comma in them are quoted.
    unquoted = re.sub(r'"[^"]*"', '', header)
    separator = max(',\t;|', key=unquoted.count)
    csv.field_size_limit(MAX_CELL)
    reader = csv.DictReader(lines, delimiter=separator)
    try:
      for row in reader:
        if None in row or None in row.values():
          raise DataError(
            f'{file}, line {reader.line_num}: the row does not have the '
            f'{len(reader.fieldnames or [])} columns of the header'
          )
        yield row
    except csv.Error as error:
      raise DataError(f'{file}, line {reader.line_num}: {error}') from error


def _read_parquet(file: Path) -> Iterator[Row]:
  try:
    import pyarrow.parquet
  except ImportError as error:
    raise DataError(f'{file}: install `pyarrow` to read Parquet files') from error
  try:
    reader = pyarrow.parquet.ParquetFile(file)
  except (pyarrow.ArrowException, OSError) as error:
    raise DataError(f'{file}: not a Parquet file: {first_line(error)}') from error
  count = 0
  batches = reader.iter_batches()
  while True:
    try:
      rows = next(batches).to_pylist()
    except StopIteration:
      return
    except (pyarrow.ArrowException, OSError, ValueError) as error:
      raise DataError(
        f'{file}, after row {count}: damaged Parquet file: {first_line(error)}'
      ) from error
    yield from rows
    count += len(rows)


def first_line(error: Exception) -> str:
  """Returns the first line of an error's message."""
  return (str(error).strip().splitlines() or [type(error).__name__])[0]


COMPRESSIONS: dict[str, Callable[..., Any]] = {
  '.gz': gzip.open,
  '.bz2': bz2.open,
  '.xz': lzma.open,
  '.zst': _open_zstd,
}
MAX_CELL = 1 << 30  # letters of a cell; the library's own limit is 131,072
FILE_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
  '.jsonl': _read_jsonl,
  '.json': _read_json,
  '.csv': _read_csv,
  '.tsv': _read_csv,
  '.parquet': _read_parquet,
}
