"""Indexes the trajectories of a run in SQLite, next to its dump.

The index holds what the table of trajectories shows, sorts and filters by, and where in
the dump each one is; tokens stay in the dump. A part of the dump that is new or has
changed is read again, and rows of one that is gone are removed. Everything is JSON or
Parquet; nothing is unpickled.
"""

import contextlib
import dataclasses
import functools
import glob
import os
import pathlib
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from launch.report.dump_rows import SAMPLES, describe_row, read_part

FILE = '.trajectories.sqlite'  # in the folder of a run
VERSION = 3  # of the tables; another one is made anew
CHECK_S = 1.0  # seconds between two looks at the dump
MAX_QUERIES = 32  # whose results are kept, so that paging runs no query again
MAX_PAGE = 500
# What a row has: the column and its type. Those in SORTED have an index.
COLUMNS = {
  'part': 'INTEGER',
  'place': 'INTEGER',  # byte or row of the part
  'size': 'INTEGER',  # bytes
  'id': 'TEXT',
  'mode': 'TEXT',
  'step': 'INTEGER',
  'tag': 'TEXT',
  'grp': 'TEXT',
  'sample': 'INTEGER',
  'turn': 'INTEGER',
  'score': 'REAL',
  'stop': 'TEXT',
  'length': 'INTEGER',  # tokens
  'actions': 'INTEGER',  # tokens that the model wrote
  'tools': 'INTEGER',  # tool calls
  'version': 'INTEGER',  # newest weights version
  'preview': 'TEXT',
}
SORTED = ('step', 'score', 'length', 'tag', 'stop', 'grp', 'id')
SHOWN = (
  'id mode step tag grp sample turn score stop length actions tools version preview'
).split()
SORTABLE = tuple(name for name in SHOWN if name != 'preview')


@dataclasses.dataclass(frozen=True)
class TrajectoryQuery:
  """Says which trajectories are asked for, and in which order.

  Attributes:
    step: The range of steps, None where it is open.
    mode: 'train' or 'val'; '' for any.
    tag: The environment's tag; '' for any.
    stop: The stop reason; '' for any.
    group: Name of the group, or the last words of it, which are those of the same
      task at all steps; '' for any.
    score: The range of scores, None where it is open.
    length: The range of tokens, None where it is open.
    text: What the conversation contains, in any case; '' for anything.
    sort: A column of the table.
    descending: Whether the largest comes first.
  """

  step: tuple[float | None, float | None] = (None, None)
  mode: str = ''
  tag: str = ''
  stop: str = ''
  group: str = ''
  score: tuple[float | None, float | None] = (None, None)
  length: tuple[float | None, float | None] = (None, None)
  text: str = ''
  sort: str = 'step'
  descending: bool = False

  def sql(self) -> tuple[str, list[Any]]:
    """Returns the query of the ids, and its arguments.

    Raises:
      ValueError: If `sort` is not a column.
    """
    if self.sort not in SORTABLE:
      raise ValueError(f'sort: {self.sort!r} is not one of {", ".join(SORTABLE)}')
    tests, values = [], []
    for column in ('mode', 'tag', 'stop'):
      if value := getattr(self, column):
        tests.append(f'r.{column} = ?')
        values.append(value)
    if self.group:
      tests.append("substr('_' || r.grp, -length(?)) = ?")
      values += [f'_{self.group}'] * 2
    for column in ('step', 'score', 'length'):
      for sign, bound in zip(('>=', '<='), getattr(self, column), strict=True):
        if bound is not None:
          tests.append(f'r.{column} {sign} ?')
          values.append(bound)
    source = 'rows r'
    if self.text:
      source = 'rows r JOIN texts x ON x.rowid = r.row'
      # SQLite finds it by its triples of letters, if it has three or more.
      tests.append('x.text GLOB ?')
      values.append(f'*{glob.escape(_folded(self.text))}*')
    where = f' WHERE {" AND ".join(tests)}' if tests else ''
    way = 'DESC' if self.descending else 'ASC'
    # Rows without a value come last either way.
    order = f'r.{self.sort} IS NULL, r.{self.sort} {way}, r.row'
    return f'SELECT r.row FROM {source}{where} ORDER BY {order}', values


def _folded(text: str) -> str:
  """Returns a text as it is searched: without case, and without ends for SQLite."""
  return text.casefold().replace('\0', ' ')


class TrajectoryIndex:
  """Answers queries on the trajectories of a run.

  Attributes:
    folder: Folder of the run.
    problems: What could not be read, by file.
    pending: Number of parts that are not indexed yet.
  """

  def __init__(self, folder: pathlib.Path, dump: Sequence[str] = ()):
    """Opens or creates the index.

    Args:
      folder: Folder of the run.
      dump: Patterns of the files of its dump: paths with `*`.
    """
    self.folder = folder
    self._patterns = tuple(dump)
    self.problems: dict[str, str] = {}
    self._lock = threading.Lock()  # of the connection that reads
    self._refreshing = threading.Lock()
    self._checked = float('-inf')
    self._matching_at = functools.lru_cache(MAX_QUERIES)(self._find_matching)
    self._facets_at = functools.lru_cache(1)(self._count_facets)
    self.pending = 0
    self._path = folder / FILE
    if not os.access(folder, os.W_OK):
      self._temporary = tempfile.TemporaryDirectory(prefix='jaxrl-view-')
      self._path = pathlib.Path(self._temporary.name) / FILE
    self._read = self._open()

  def close(self) -> None:
    """Closes the file."""
    with self._lock:
      self._read.close()

  # ---- the file

  def _open(self) -> sqlite3.Connection:
    try:
      return self._connect()
    except sqlite3.DatabaseError as error:
      if isinstance(error, sqlite3.OperationalError) and 'locked' in str(error):
        raise
      for end in ('', '-wal', '-shm'):  # damaged: it only repeats what the dump says
        pathlib.Path(f'{self._path}{end}').unlink(missing_ok=True)
      return self._connect()

  def _connect(self) -> sqlite3.Connection:
    connection = sqlite3.connect(
      self._path, timeout=10.0, check_same_thread=False, isolation_level=None
    )
    try:
      connection.execute('PRAGMA journal_mode=WAL')
      connection.execute('PRAGMA synchronous=OFF')  # a lost index is built again
      connection.execute('PRAGMA mmap_size=1073741824')
      version = connection.execute('PRAGMA user_version').fetchone()[0]
      if version != VERSION:
        _create_tables(connection)
      connection.execute('SELECT count(*) FROM parts').fetchone()
    except sqlite3.Error:
      connection.close()
      raise
    return connection

  # ---- reading the dump

  def refresh(self) -> None:
    """Indexes what is new or has changed; another thread's refresh is waited for."""
    with self._refreshing:
      if time.monotonic() - self._checked < CHECK_S:
        return
      with contextlib.closing(self._connect()) as write:
        self._index_changes(write)
      self._checked = time.monotonic()

  @property
  def is_stale(self) -> bool:
    """Whether it is time to look at the dump again."""
    return time.monotonic() - self._checked >= CHECK_S

  def _index_changes(self, write: sqlite3.Connection) -> None:
    files = {str(path): path for path in self._files()}
    known = {
      path: (number, size, mtime)
      for number, path, size, mtime in write.execute(
        'SELECT part, path, size, mtime FROM parts'
      )
    }
    states = {}
    for name, path in files.items():
      with contextlib.suppress(OSError):
        stat = path.stat()
        states[name] = stat.st_size, stat.st_mtime_ns
    changed = [name for name in states if states[name] != known.get(name, ())[1:]]
    gone = [name for name in known if name not in states]
    self.pending = len(changed)
    for name in gone:
      with _transaction(write):
        _remove_part(write, known[name][0])
    for name in changed:
      self._index_part(write, files[name], *states[name])
      self.pending -= 1
    if changed or gone:
      with _transaction(write):
        _remove_sampled_twins(write)

  def _files(self) -> list[pathlib.Path]:
    # Several patterns may name one folder: relative, absolute or through a link.
    files: set[pathlib.Path] = set()
    for pattern in self._patterns:
      path = pathlib.Path(pattern)
      with contextlib.suppress(OSError):
        files |= {p.resolve() for p in path.parent.glob(path.name) if p.is_file()}
    samples = self.folder.resolve() / SAMPLES
    return sorted(files) + ([samples] if samples.is_file() else [])

  def _index_part(
    self, write: sqlite3.Connection, path: pathlib.Path, size: int, mtime: int
  ) -> None:
    name = str(path)
    problems = 0
    with _transaction(write):
      old = write.execute('SELECT part, size, mtime FROM parts WHERE path = ?', (name,))
      state = old.fetchone()
      if state is not None:
        if state[1:] == (size, mtime):
          return  # another process was faster
        _remove_part(write, state[0])
      cursor = write.execute(
        'INSERT INTO parts(path, size, mtime) VALUES (?, ?, ?)', (name, size, mtime)
      )
      part = cursor.lastrowid
      try:
        for place, length, row in read_part(path):
          row_name = f'{path.stem}_{place}'
          values = describe_row(row, row_name) if row is not None else None
          if values is None:
            problems += 1
          else:
            place_values = {'part': part, 'place': place, 'size': length}
            _insert_row(write, place_values | values)
      except (OSError, ValueError, ImportError) as error:
        self.problems[name] = f'{type(error).__name__}: {error}'
        return
    if problems:
      self.problems[name] = f'{problems} lines are not rows of a dump'
    else:
      self.problems.pop(name, None)

  # ---- answering

  def select(self, query: TrajectoryQuery, offset: int, limit: int) -> dict[str, Any]:
    """Returns a page of the trajectories that match a query.

    Args:
      query: Which ones, in which order.
      offset: Number of rows before the page.
      limit: Rows of the page, at most MAX_PAGE.

    Returns:
      `total` and `rows`, each a mapping of SHOWN names to values.
    """
    rows = self._matching(query)
    page = [int(row) for row in rows[offset : offset + min(limit, MAX_PAGE)]]
    marks = ','.join('?' * len(page))
    records = self._query(
      f'SELECT row, {", ".join(SHOWN)} FROM rows WHERE row IN ({marks})', page
    )
    by_row = {row[0]: dict(zip(SHOWN, row[1:], strict=True)) for row in records}
    return {'total': len(rows), 'rows': [by_row[row] for row in page if row in by_row]}

  def neighbours(
    self, query: TrajectoryQuery, name: str
  ) -> tuple[int | None, str | None, str | None]:
    """Returns the position of an id in a query's results, and the ids beside it."""
    rows = self._matching(query)
    row = self._query('SELECT row FROM rows WHERE id = ?', [name])
    at = np.flatnonzero(rows == (row[0][0] if row else -1))
    if not len(at):
      return None, None, None
    position = int(at[0])

    def id_at(place: int) -> str | None:
      if not 0 <= place < len(rows):
        return None
      ids = self._query('SELECT id FROM rows WHERE row = ?', [int(rows[place])])
      return ids[0][0] if ids else None

    return position, id_at(position - 1), id_at(position + 1)

  def _matching(self, query: TrajectoryQuery) -> np.ndarray:
    """Returns the numbers of the rows that match, in order."""
    return self._matching_at(query, self._generation())

  def _find_matching(self, query: TrajectoryQuery, generation: int) -> np.ndarray:
    matches = self._query(*query.sql())
    return np.fromiter((row[0] for row in matches), np.int64, len(matches))

  def facets(self) -> dict[str, Any]:
    """Returns the values that can be asked for: modes, tags, reasons, ranges."""
    return self._facets_at(self._generation())

  def _generation(self) -> int:
    """Returns a number that changes when the index does, whoever changes it."""
    return self._query('PRAGMA data_version', [])[0][0]

  def _count_facets(self, generation: int) -> dict[str, Any]:
    counts = {
      name: self._query(
        f'SELECT {column}, count(*) FROM rows WHERE {column} IS NOT NULL '
        f'GROUP BY {column} ORDER BY {column} LIMIT 200',
        [],
      )
      for name, column in (('modes', 'mode'), ('tags', 'tag'), ('stops', 'stop'))
    }
    ((total, low, high),) = self._query(
      'SELECT count(*), min(step), max(step) FROM rows', []
    )
    return {**counts, 'total': total, 'steps': [low, high]}

  def find(self, name: str) -> tuple[dict[str, Any], pathlib.Path, int, int] | None:
    """Returns the row of an id, and the file, place and size of its content."""
    columns = ', '.join(SHOWN)
    matches = self._query(
      f'SELECT path, place, rows.size, {columns} FROM rows JOIN parts USING (part) '
      'WHERE id = ? ORDER BY row LIMIT 1',
      [name],
    )
    if not matches:
      return None
    path, place, size, *values = matches[0]
    return dict(zip(SHOWN, values, strict=True)), pathlib.Path(path), place, size

  def group(self, name: str) -> list[dict[str, Any]]:
    """Returns the rows of a group, by sample and turn."""
    members = self._query(
      f'SELECT {", ".join(SHOWN)} FROM rows WHERE grp = ? '
      f'ORDER BY sample, turn LIMIT {MAX_PAGE}',
      [name],
    )
    return [dict(zip(SHOWN, row, strict=True)) for row in members]

  def _query(self, text: str, values: Sequence[Any]) -> list[tuple]:
    with self._lock:
      return self._read.execute(text, values).fetchall()


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
  connection.execute('BEGIN IMMEDIATE')
  try:
    yield
  except BaseException:
    connection.execute('ROLLBACK')
    raise
  connection.execute('COMMIT')


def _create_tables(connection: sqlite3.Connection) -> None:
  with _transaction(connection):
    for table in ('parts', 'rows', 'texts'):
      connection.execute(f'DROP TABLE IF EXISTS {table}')
    connection.execute(
      'CREATE TABLE parts(part INTEGER PRIMARY KEY, path TEXT UNIQUE, size INTEGER, '
      'mtime INTEGER)'
    )
    columns = ', '.join(f'{name} {kind}' for name, kind in COLUMNS.items())
    connection.execute(f'CREATE TABLE rows(row INTEGER PRIMARY KEY, {columns})')
    for name in ('part', *SORTED):
      connection.execute(f'CREATE INDEX rows_{name} ON rows({name})')
    try:
      connection.execute(
        'CREATE VIRTUAL TABLE texts USING fts5(text, detail=none, columnsize=0, '
        "tokenize='trigram')"
      )
    except sqlite3.OperationalError:  # an old SQLite, which reads all texts then
      connection.execute('CREATE TABLE texts(text TEXT)')
    connection.execute(f'PRAGMA user_version={VERSION}')


def _insert_row(write: sqlite3.Connection, values: Mapping[str, Any]) -> None:
  marks = ', '.join('?' * len(COLUMNS))
  cursor = write.execute(
    f'INSERT INTO rows({", ".join(COLUMNS)}) VALUES ({marks})',
    [values.get(name) for name in COLUMNS],
  )
  write.execute(
    'INSERT INTO texts(rowid, text) VALUES (?, ?)',
    (cursor.lastrowid, _folded(values['text'])),
  )


def _remove_part(write: sqlite3.Connection, part: int) -> None:
  _remove_rows(write, 'part = ?', (part,))
  write.execute('DELETE FROM parts WHERE part = ?', (part,))


def _remove_rows(write: sqlite3.Connection, test: str, values: Sequence[Any]) -> None:
  rows = f'SELECT row FROM rows WHERE {test}'
  write.execute(f'DELETE FROM texts WHERE rowid IN ({rows})', values)
  write.execute(f'DELETE FROM rows WHERE {test}', values)


def _remove_sampled_twins(write: sqlite3.Connection) -> None:
  """Removes samples of the report that the dump has too, and has whole."""
  samples = f"(SELECT part FROM parts WHERE path LIKE '%{SAMPLES}')"
  dumped = f'SELECT id FROM rows WHERE part NOT IN {samples}'
  _remove_rows(write, f'part IN {samples} AND id IN ({dumped})', ())
