"""FileWriter stores dumps as JSON lines or Parquet on any fsspec file system.

A part is written at once, under a name that its number determines, so writing it again
changes nothing. The journal of the dump relies on that.
"""

import io
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from jaxrl.data.trajectory_writers.dump_columns import DumpRow
from jaxrl.options import unknown_name_error

if TYPE_CHECKING:
  from jaxrl.data.images import Image

IMAGES = 'images'  # the folder of the images, beside the parts


class TrajectoryWriter(Protocol):
  """Protocol: stores the parts of a dump."""

  def check(self, *, fresh: bool) -> None:
    """Checks that the destination can be written.

    Args:
      fresh: Whether this run has written nothing yet, so that existing parts are
        another run's.

    Raises:
      ValueError: If nothing can be written there.
    """
    ...

  def write(self, name: str, rows: Sequence[DumpRow]) -> None:
    """Writes a complete part, replacing one of the same name. May be repeated.

    Args:
      name: The name of the part.
      rows: The rows of the part.
    """
    ...


class FileWriter:
  """Writes parts as files `FOLDER/[STEM-]MODE-NAME.FORMAT`.

  Args:
    path: A folder or fsspec URL for JSON lines, or one that ends in `.jsonl` or
      `.parquet`, whose last name is the stem.
    mode: The mode of the rollout, which is part of the file names.
    types: The type of each column, by name.

  Raises:
    ValueError: If the scheme or format is unknown.
  """

  def __init__(self, path: str, mode: str, types: Mapping[str, str]):
    self.path = path
    self._types = dict(types)
    self._stored: set[str] = set()  # what stands for the images that are there
    self._files, root = _open(path)
    folder, _, name = root.rpartition('/')
    stem, dot, kind = name.rpartition('.')
    if dot and kind in FILE_FORMATS and stem:
      self._folder, start = folder or '.', f'{stem}-'
    elif dot and stem and kind in ('csv', 'json', 'txt', 'pq', 'arrow', 'orc'):
      raise unknown_name_error(
        kind, FILE_FORMATS, 'format', f'trajectory_dump.path={path}'
      )
    else:
      self._folder, start, kind = root.rstrip('/') or '/', '', 'jsonl'
    self._start = f'{self._folder}/{start}{mode}-'
    self._kind, self._suffix = kind, f'.{kind}'

  def name_of(self, name: str) -> str:
    """Returns the path of a part.

    Args:
      name: The name of the part.

    Returns:
      The path on the file system.
    """
    return f'{self._start}{name}{self._suffix}'

  def check(self, *, fresh: bool) -> None:
    """Checks that the folder can be written and holds no other run's parts."""
    where = f'trajectory_dump.path={self.path}'
    probe = f'{self._start}probe.tmp'
    try:
      self._files.makedirs(self._folder, exist_ok=True)
      self._files.pipe_file(probe, b'probe')
      self._files.rm_file(probe)
      self._files.invalidate_cache()
      existing = self._files.glob(self.name_of('*'))
    except Exception as error:  # each store has its own
      text = f'{type(error).__name__}: {error}'
      raise ValueError(f'{where}: cannot write there: {text}') from error
    if fresh and existing:
      raise ValueError(
        f'{where} holds {len(existing)} parts of another run, {existing[0]} among '
        'them: name another path, or the workdir that wrote them'
      )

  def write(self, name: str, rows: Sequence[DumpRow]) -> None:
    """Writes a part as one file, atomically on a local disk."""
    self._put(self.name_of(name), FILE_FORMATS[self._kind](rows, self._types))

  def write_images(self, images: 'Mapping[str, Image]') -> None:
    """Stores images as `FOLDER/images/DIGEST.png`, each once; rows name them.

    Args:
      images: The images, as `trajectory_codec.images_of` returns them.
    """
    folder = f'{self._folder}/{IMAGES}'
    new = {mark: x for mark, x in images.items() if mark not in self._stored}
    if new and not self._stored:
      self._files.makedirs(folder, exist_ok=True)
    for mark, image in new.items():
      path = f'{folder}/{image.digest}.png'
      if not self._files.exists(path):
        self._put(path, image.png)
      self._stored.add(mark)

  def _put(self, path: str, data: bytes) -> None:
    """Writes a file, atomically on a local disk."""
    if 'file' not in _protocols(self._files):
      self._files.pipe_file(path, data)
      return
    partial = pathlib.Path(f'{path}.tmp')
    with partial.open('wb') as file:
      file.write(data)
      file.flush()
      os.fsync(file.fileno())
    os.replace(partial, path)


def _protocols(files: Any) -> Sequence[str]:
  return [files.protocol] if isinstance(files.protocol, str) else files.protocol


def _open(path: str) -> tuple[Any, str]:
  """Returns the file system and the path on it. Raises ValueError."""
  import fsspec

  where = f'trajectory_dump.path={path}'
  if not path.strip():
    raise ValueError('trajectory_dump.path is empty: set it to a folder or a URL')
  scheme, colon, _ = path.partition('://')
  known = set(fsspec.available_protocols())
  if colon and scheme.split('::')[0] not in known:
    raise unknown_name_error(scheme, [*known, 'odps', 'atif'], 'scheme', where)
  try:
    return fsspec.core.url_to_fs(path)
  except (ImportError, ValueError, OSError) as error:
    raise ValueError(f'{where}: {error}') from error


def _jsonl(rows: Sequence[DumpRow], types: Mapping[str, str]) -> bytes:
  return b''.join(json.dumps(row, allow_nan=False).encode() + b'\n' for row in rows)


def _parquet(rows: Sequence[DumpRow], types: Mapping[str, str]) -> bytes:
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


FILE_FORMATS: dict[str, Callable[[Sequence[DumpRow], Mapping[str, str]], bytes]] = {
  'jsonl': _jsonl,
  'parquet': _parquet,
}
