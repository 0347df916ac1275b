"""Parts of a dump as files: JSON lines or Parquet, on anything fsspec reaches.

A part is written whole, under a name that its number decides, so writing it again
changes nothing: on that the ledger builds.
"""

import io
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jaxrl.data.sinks.columns import Row
from jaxrl.signature import ConfigError, unknown


class Parts(Protocol):
  """Where the parts of a dump go."""

  def check(self, *, fresh: bool) -> None:
    """Raises ConfigError when nothing can be written there.

    fresh: this run has written nothing yet, so what is there is another's.
    """
    ...

  def write(self, name: str, rows: Sequence[Row]) -> None:
    """Writes a part whole, in the place of one of this name. May be called anew."""
    ...


class Files:
  """Parts as files `FOLDER/[STEM-]MODE-NAME.FORMAT`.

  path: a folder or fsspec URL, for JSON lines; or one that ends in `.jsonl` or
  `.parquet`, whose last name is the stem. types: the columns', by name.
  """

  def __init__(self, path: str, mode: str, types: Mapping[str, str]):
    self.path, self._types = path, dict(types)
    self._files, root = _open(path)
    folder, _, name = root.rpartition('/')
    stem, dot, kind = name.rpartition('.')
    if dot and kind in FORMATS and stem:
      self._folder, start = folder or '.', f'{stem}-'
    elif dot and stem and kind in ('csv', 'json', 'txt', 'pq', 'arrow', 'orc'):
      raise unknown(kind, FORMATS, 'format', f'--config.dump.path={path}')
    else:
      self._folder, start, kind = root.rstrip('/') or '/', '', 'jsonl'
    self._start, self._kind = f'{self._folder}/{start}{mode}-', kind

  def name_of(self, name: str) -> str:
    """The path of a part."""
    return f'{self._start}{name}.{self._kind}'

  def check(self, *, fresh: bool) -> None:
    where = f'--config.dump.path={self.path}'
    probe = f'{self._start}probe.tmp'
    try:
      self._files.makedirs(self._folder, exist_ok=True)
      self._files.pipe_file(probe, b'probe')
      self._files.rm_file(probe)
      self._files.invalidate_cache()
      found = self._files.glob(self.name_of('*'))
    except Exception as error:  # each store has its own
      text = f'{type(error).__name__}: {error}'
      raise ConfigError(f'{where}: cannot write there: {text}') from error
    if fresh and found:
      raise ConfigError(
        f'{where} holds {len(found)} parts of another run, {found[0]} among them: '
        'name another path, or the --workdir that wrote them'
      )

  def write(self, name: str, rows: Sequence[Row]) -> None:
    data, path = FORMATS[self._kind](rows, self._types), self.name_of(name)
    if 'file' not in _protocols(self._files):
      self._files.pipe_file(path, data)
      return
    half = pathlib.Path(f'{path}.tmp')
    with half.open('wb') as file:
      file.write(data)
      file.flush()
      os.fsync(file.fileno())
    os.replace(half, path)


def _protocols(files: Any) -> Sequence[str]:
  return [files.protocol] if isinstance(files.protocol, str) else files.protocol


def _open(path: str) -> tuple[Any, str]:
  """The file system and the path on it. Raises ConfigError for what there is not."""
  import fsspec

  where = f'--config.dump.path={path}'
  if not path.strip():
    raise ConfigError('where to? Set --config.dump.path to a folder or a URL')
  scheme, colon, _ = path.partition('://')
  known = set(fsspec.available_protocols())
  if colon and scheme.split('::')[0] not in known:
    raise unknown(scheme, [*known, 'odps'], 'scheme', where)
  try:
    return fsspec.core.url_to_fs(path)
  except (ImportError, ValueError, OSError) as error:
    raise ConfigError(f'{where}: {error}') from error


def _jsonl(rows: Sequence[Row], types: Mapping[str, str]) -> bytes:
  return b''.join(json.dumps(row, allow_nan=False).encode() + b'\n' for row in rows)


def _parquet(rows: Sequence[Row], types: Mapping[str, str]) -> bytes:
  import pyarrow
  import pyarrow.parquet

  kinds = {
    'tinyint': pyarrow.int8(),
    'smallint': pyarrow.int16(),
    'int': pyarrow.int32(),
    'bigint': pyarrow.int64(),
    'float': pyarrow.float32(),
    'double': pyarrow.float64(),
    'boolean': pyarrow.bool_(),
    'string': pyarrow.string(),
  }
  schema = pyarrow.schema([(name, kinds[kind]) for name, kind in types.items()])
  sink = io.BytesIO()
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows), schema), sink)
  return sink.getvalue()


FORMATS: dict[str, Callable[[Sequence[Row], Mapping[str, str]], bytes]] = {
  'jsonl': _jsonl,
  'parquet': _parquet,
}
