"""Row readers turn one file of any known kind into rows, and name the place of a fault.

| suffix | what is read |
|---|---|
| `.jsonl`, `.ndjson` | one object a line |
| `.json` | a list of objects, an object with such a list, or several objects |
| `.csv`, `.tsv` | a header and records, separated by comma, semicolon, tab or bar |
| `.parquet`, `.arrow` | tables, as the Hub and `save_to_disk` have them |

Each may be compressed (`.gz`, `.bz2`, `.xz`, `.zst`), suffixes may be upper case, and
text may be UTF-8 or UTF-16, with or without a byte order mark.
"""

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import re
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from jaxrl.options import ConfigError

Row = dict[str, Any]
_PEEK_BYTES = 64  # from which the encoding is recognised
_DAMAGED = (EOFError, zlib.error, lzma.LZMAError)
# Keys of a JSON object that hold its rows.
_ROW_LISTS = ('data', 'rows', 'examples', 'instances', 'items', 'records', 'samples')
# Keys of a row that hold a list of objects.
_ROW_KEYS = frozenset('messages conversations prompt chosen rejected tools'.split())
_SEPARATORS = (',', ';', '\t', '|')
_CSV_LIMIT_LOCK = threading.Lock()  # of the only limit that `csv` has


class DataError(ConfigError):
  """Reports which file is wrong, where in it, and what to do."""


def is_row_file(name: str) -> bool:
  """Returns whether a file of this name can be read.

  Args:
    name: The file's name, or its path.
  """
  kind, _ = _kind(name)
  return kind in FILE_READERS


def file_stem(name: str) -> str:
  """Returns a file's name without the suffixes that say how it is read.

  Args:
    name: The file's name, or its path.
  """
  base = name.rpartition('/')[2]
  kind, packing = _kind(base)
  return base[: len(base) - len(kind) - len(packing)]


def read_file(file: Path) -> Iterator[Row]:
  """Yields the rows of a file.

  Args:
    file: The file.

  Yields:
    The rows.

  Raises:
    DataError: If the file is of an unknown kind or damaged; the error names the place.
  """
  kind, packing = _kind(file.name)
  if kind not in FILE_READERS:
    known = ', '.join(FILE_READERS)
    raise DataError(
      f'{file}: unknown kind of file; known are {known}, also compressed as '
      f'{", ".join(_OPENERS)}'
    )
  try:
    yield from FILE_READERS[kind](file)
  except _DAMAGED as error:
    raise DataError(
      f'{file}: damaged {packing or kind} file: {first_line(error)}'
    ) from error
  except OSError as error:
    raise DataError(f'{file} cannot be read: {error.strerror or error}') from error


def first_line(error: Exception) -> str:
  """Returns the first line of an error's message."""
  return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _kind(name: str) -> tuple[str, str]:
  """Returns the suffix of a kind of file, and that of a compression or ''."""
  suffixes = [suffix.lower() for suffix in Path(name).suffixes]
  packing = suffixes.pop() if suffixes and suffixes[-1] in _OPENERS else ''
  return (suffixes[-1] if suffixes else ''), packing


# ---- Bytes and text


def _open_zst(file: Path) -> IO[bytes]:
  import pyarrow

  return io.BufferedReader(pyarrow.input_stream(str(file), compression='zstd'))


_OPENERS: dict[str, Callable[[Path], IO[bytes]]] = {
  '.gz': gzip.open,  # pyright: ignore[reportAssignmentType]
  '.bz2': bz2.open,  # pyright: ignore[reportAssignmentType]
  '.xz': lzma.open,  # pyright: ignore[reportAssignmentType]
  '.zst': _open_zst,
}


def _open_bytes(file: Path) -> IO[bytes]:
  _, packing = _kind(file.name)
  return _OPENERS[packing](file) if packing else file.open('rb')


def _encoding(start: bytes) -> str:
  """Returns the encoding of a text file by its first bytes."""
  if start.startswith((b'\xff\xfe\0\0', b'\0\0\xfe\xff')):
    return 'utf-32'
  if start.startswith((b'\xff\xfe', b'\xfe\xff')):
    return 'utf-16'
  zeros = [start[i::2].count(0) for i in (0, 1)]  # as in English text in UTF-16
  if max(zeros) * 4 > len(start):
    return 'utf-16-be' if zeros[0] > zeros[1] else 'utf-16-le'
  return 'utf-8-sig'


def _open_text(file: Path, newline: str | None = None) -> IO[str]:
  with _open_bytes(file) as data:
    encoding = _encoding(data.read(_PEEK_BYTES))
  return io.TextIOWrapper(_open_bytes(file), encoding=encoding, newline=newline)


def _lines(file: Path, newline: str | None = None) -> Iterator[str]:
  """Yields the lines of a text; an error names the first that is not text."""
  with _open_text(file, newline) as lines:
    try:
      yield from lines
    except UnicodeError as error:
      raise _not_text(file, error) from error


def _not_text(file: Path, error: UnicodeError) -> DataError:
  with _open_bytes(file) as data:
    for number, line in enumerate(data, 1):
      try:
        line.decode('utf-8')
      except UnicodeDecodeError as found:
        reason = f'byte 0x{line[found.start]:02x} after {found.start} others'
        return DataError(
          f'{file}, line {number}: not UTF-8 text ({reason}): save the file as UTF-8'
        )
  return DataError(f'{file}: not UTF-8 text: {error}: save the file as UTF-8')


# ---- JSON


def _read_jsonl(file: Path) -> Iterator[Row]:
  is_first = True
  for number, line in enumerate(_lines(file), 1):
    if not line.strip():
      continue
    try:
      row = _parse(line, f'{file}, line {number}')
    except DataError:
      rows = _whole_document(file) if is_first else None
      if rows is None:
        raise
      yield from rows
      return
    is_first = False
    yield row


def _whole_document(file: Path) -> list[Row] | None:
  """Returns the rows of a file that is not one object a line after all, or None."""
  try:
    return list(_read_json(file))
  except DataError:
    return None


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


def _check_surrogates(text: str, value: object, where: str) -> None:
  r"""Raises DataError for half a surrogate pair, such as \ud800, which is not text."""
  if r'\ud' not in text and r'\uD' not in text:
    return
  try:
    json.dumps(value, ensure_ascii=False).encode()
  except UnicodeEncodeError as error:
    letter = error.object[error.start]
    raise DataError(
      f'{where}: {letter!a} is half of a surrogate pair, which is not text'
    ) from error


def _read_json(file: Path) -> Iterator[Row]:
  text = ''.join(_lines(file))
  values = _json_values(text, file)
  _check_surrogates(text, values, str(file))
  rows = _listed_rows(values[0], file) if len(values) == 1 else values
  for i, row in enumerate(rows):
    if not isinstance(row, dict):
      raise DataError(f'{file}, row {i}: must be an object, not {type(row).__name__}')
    yield row


def _json_values(text: str, file: Path) -> list[Any]:
  """Parses a JSON document, or several that follow each other."""
  decoder, values, position = json.JSONDecoder(), [], 0
  space = re.compile(r'\s*')
  try:
    while (position := space.match(text, position).end()) < len(text):  # pyright: ignore[reportOptionalMemberAccess]
      value, position = decoder.raw_decode(text, position)
      values.append(value)
  except json.JSONDecodeError as error:
    raise DataError(
      f'{file}, line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}'
    ) from error
  except (ValueError, RecursionError) as error:
    raise DataError(f'{file}: JSON that cannot be read: {error}') from error
  return values


def _listed_rows(value: object, file: Path) -> list[Any]:
  """Returns the rows of a JSON document: a list, an object with a list, or one row."""
  if isinstance(value, list):
    return value
  if not isinstance(value, dict):
    raise DataError(f'{file}: must hold a list of objects')
  lists = {
    key: rows
    for key, rows in value.items()
    if isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
  }
  for key in _ROW_LISTS:
    if key in lists:
      return lists[key]
  if lists and not _ROW_KEYS & lists.keys():
    if len(lists) == 1:
      return next(iter(lists.values()))
    names = ', '.join(lists)
    raise DataError(
      f'{file}: holds several lists of rows ({names}): write each to its own file'
    )
  if _has_columns(value):
    raise DataError(
      f'{file}: holds columns ({", ".join(map(str, value))[:80]}) rather than rows: '
      'write a list with one object for each row'
    )
  return [value]


def _has_columns(value: Row) -> bool:
  """Returns whether all values of an object are lists or objects of equal indices."""
  columns = list(value.values())
  if len(columns) < 2:
    return False
  if all(isinstance(column, dict) and '0' in column for column in columns):
    return len({tuple(column) for column in columns}) == 1
  if not all(isinstance(column, list) for column in columns) or _ROW_KEYS & set(value):
    return False
  return len({len(column) for column in columns}) == 1


# ---- Tables


def _read_csv(file: Path) -> Iterator[Row]:
  lines = _lines(file, newline='')
  first = next(lines, '')
  skipped = 0
  if match := re.fullmatch(r'sep=(.)\s*', first):  # which some spreadsheets write
    separator, skipped = match[1], 1
  else:
    separator = _separator(file, first)
    lines = itertools.chain([first], lines)
  reader = csv.reader(lines, delimiter=separator, strict=True)
  number = 1
  try:
    header = [name.strip() for name in _next_record(reader) or []]
    _check_header(file, header)
    while True:
      number = reader.line_num + skipped + 1
      cells = _next_record(reader)
      if cells is None:
        return
      if not cells:
        continue
      if len(cells) != len(header):
        raise DataError(
          f'{file}, line {number}: the row does not have the {len(header)} columns of '
          f'the header, but {len(cells)}'
        )
      yield dict(zip(header, cells, strict=True))
  except csv.Error as error:
    raise DataError(
      f'{file}, line {number}: not a valid table: {first_line(error)}: a quotation '
      'mark in a quoted cell is written twice'
    ) from error


def _next_record(reader: Iterator[list[str]]) -> list[str] | None:
  """Returns the next record, however long its cells are; None after the last one.

  The `csv` module's limit holds for the whole process, so it is lifted for this record
  alone: what else reads tables in this process keeps its own.
  """
  with _CSV_LIMIT_LOCK:
    limit = csv.field_size_limit(sys.maxsize)  # a cell may hold a whole conversation
    try:
      return next(reader, None)
    finally:
      csv.field_size_limit(limit)


def _check_header(file: Path, header: list[str]) -> None:
  twice = {name for name in header if header.count(name) > 1}
  if twice:
    raise DataError(f'{file}: the header has {min(twice)!r} twice: rename a column')


def _separator(file: Path, header: str) -> str:
  """Returns what separates the cells of a header: what occurs most outside quotes."""
  if _kind(file.name)[0] == '.tsv' and '\t' in header:
    return '\t'
  plain = re.sub(r'"[^"]*"', '', header)
  return max(_SEPARATORS, key=plain.count)  # the first of those that are equal


def _read_parquet(file: Path) -> Iterator[Row]:
  import pyarrow.parquet

  try:
    reader = pyarrow.parquet.ParquetFile(_arrow_source(file))
  except (pyarrow.ArrowException, OSError) as error:
    raise DataError(f'{file}: not a Parquet file: {first_line(error)}') from error
  yield from _batched_rows(file, reader.iter_batches(), 'Parquet')


def _arrow_source(file: Path) -> Any:
  """Returns a file for pyarrow: its path, or its bytes if it is compressed."""
  if not _kind(file.name)[1]:
    return str(file)
  import pyarrow

  with _open_bytes(file) as data:
    return pyarrow.BufferReader(data.read())


def _read_arrow(file: Path) -> Iterator[Row]:
  import pyarrow.ipc

  try:
    with _open_bytes(file) as data:
      is_file = data.read(6) == b'ARROW1'
    source = _arrow_source(file)
    source = pyarrow.memory_map(source) if isinstance(source, str) else source
    if is_file:
      table = pyarrow.ipc.open_file(source)
      batches = (table.get_batch(i) for i in range(table.num_record_batches))
    else:
      batches = iter(pyarrow.ipc.open_stream(source))
  except (pyarrow.ArrowException, OSError) as error:
    raise DataError(f'{file}: not an Arrow file: {first_line(error)}') from error
  yield from _batched_rows(file, batches, 'Arrow')


def _batched_rows(file: Path, batches: Iterator[Any], kind: str) -> Iterator[Row]:
  import pyarrow

  count = 0
  while True:
    try:
      rows = next(batches).to_pylist()
    except StopIteration:
      return
    except (pyarrow.ArrowException, OSError, ValueError) as error:
      raise DataError(
        f'{file}, after row {count}: damaged {kind} file: {first_line(error)}'
      ) from error
    yield from rows
    count += len(rows)


FILE_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
  '.jsonl': _read_jsonl,
  '.json': _read_json,
  '.csv': _read_csv,
  '.parquet': _read_parquet,
  '.ndjson': _read_jsonl,
  '.tsv': _read_csv,
  '.arrow': _read_arrow,
}
