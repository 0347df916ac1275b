"""MaxComputeWriter stores dumps as rows of a MaxCompute table (`odps://…`).

It uses pyodps. A part is one upload session, which the service commits completely or
not at all. The session's id is recorded on this machine's disk before anything is sent.
After a kill the service is asked whether that session was committed, so no part is
written twice.
"""

import logging
import os
import pathlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.data.trajectory_writers.dump_columns import DumpRow

log = logging.getLogger(__name__)

ODPS_PATH = re.compile(r'odps://([^/]+)/tables/([^/]+)((?:/[^/=]+=[^/=]+)*)/?')
ODPS_PATH_FORM = (
  'odps://PROJECT/tables/TABLE, and /NAME=VALUE for each partition column'
)
MAX_STRING_BYTES = 8 * 2**20  # bytes of a string that MaxCompute takes
BLOCK = 0
CREDENTIAL_KEYS = ('endpoint', 'tunnel_endpoint', 'access_id', 'access_key')


class MaxComputeWriter:
  """Writes parts to a table, or to a partition of it, which is created if missing.

  Rows are added to those that the partition already has. ODPS_ENDPOINT, ODPS_ACCESS_ID,
  ODPS_ACCESS_KEY and, optionally, ODPS_TUNNEL_ENDPOINT say where; without keys, the
  tokens that pyodps finds.

  Args:
    path: `odps://project/tables/table/ds=name`.
    types: The type of each column. The table must have these columns, in any order; its
      others become null.
    folder: A folder on this machine's disk for the ids of uploads.

  Raises:
    ValueError: If the path has another form.
  """

  def __init__(self, path: str, types: Mapping[str, str], folder: pathlib.Path):
    self._where = f'trajectory_dump.path={path}'
    match = ODPS_PATH.fullmatch(path)
    if match is None:
      raise ValueError(f'{self._where}: write {ODPS_PATH_FORM}')
    self._project, self._table, parts = match.groups()
    self._partition = ','.join(filter(None, parts.split('/'))) or None
    self._types = dict(types)
    self._folder = folder

  def _connect(self, project: str) -> Any:
    """Returns pyodps's entry object, by the variables or tokens that it finds."""
    try:
      from odps import ODPS  # pyright: ignore[reportMissingImports]
    except ImportError:
      raise ValueError(
        f"{self._where}: needs pyodps: pip install -e '.[odps]'"
      ) from None
    settings = {key: os.environ.get(f'ODPS_{key.upper()}') for key in CREDENTIAL_KEYS}
    try:
      if settings['access_id'] and settings['access_key'] and settings['endpoint']:
        keys = settings['access_id'], settings['access_key'], project
        address = settings['tunnel_endpoint'] or None
        return ODPS(*keys, endpoint=settings['endpoint'], tunnel_endpoint=address)
      entry = ODPS.from_environments()  # tokens
    except TypeError:
      entry = None
    if entry is None:
      raise ValueError(
        f'{self._where}: set ODPS_ENDPOINT, ODPS_ACCESS_ID and ODPS_ACCESS_KEY in the '
        'environment'
      )
    return entry

  def _session(self, upload_id: str | None = None) -> Any:
    entry = self._connect(self._project)
    from odps.tunnel import TableTunnel  # pyright: ignore[reportMissingImports]

    return TableTunnel(entry, project=self._project).create_upload_session(
      self._table, self._partition, upload_id=upload_id, create_partition=True
    )

  def check(self, *, fresh: bool) -> None:
    """Checks that a session can be opened and that the table has the columns.

    Args:
      fresh: Ignored, since rows are only added.

    Raises:
      ValueError: If the table cannot be written or lacks a column.
    """
    try:
      schema = self._session().schema
    except ValueError:
      raise
    except Exception as error:  # pyodps has many
      text = ' '.join(f'{type(error).__name__}: {error}'.split())
      raise ValueError(f'{self._where}: cannot write there: {text}') from error
    table_types = {c.name: str(c.type).lower() for c in schema.simple_columns}
    for name, kind in self._types.items():
      if table_types.get(name) != kind:
        problem = f'is a {table_types[name]} in' if name in table_types else 'is not in'
        existing = ', '.join(f'{n} {k}' for n, k in table_types.items())
        raise ValueError(
          f'{self._where}: column {name!r}, a {kind}, {problem} the table, which has '
          f'{existing}: set trajectory_dump.columns'
        )

  def write(self, name: str, rows: Sequence[DumpRow]) -> None:
    """Adds a part unless it was added before.

    Args:
      name: The name of the part.
      rows: The rows of the part.

    Raises:
      OSError: If it is unknown whether the part was added before.
    """
    session = self._resume_session(name)
    if session is None:
      session = self._session()
      self._record_session(name, session.id)
    if session.status is session.Status.Closed:
      return
    with session.open_record_writer(BLOCK) as writer:
      for row in rows:
        writer.write(self._record(session, row))
    session.commit([BLOCK])

  def _resume_session(self, name: str) -> Any:
    """Returns the session in which a part was begun before, or None."""
    note = self._folder / f'{name}.upload'
    if not note.exists():
      return None
    upload_id = note.read_text()
    try:
      session = self._session(upload_id)
      while session.status is session.Status.Closing:
        time.sleep(1)
        session.reload()
    except Exception as error:
      text = f'the service answers {type(error).__name__}: {error}'
      raise self._unknown(name, note, text) from error
    if session.status not in (session.Status.Normal, session.Status.Closed):
      raise self._unknown(name, note, f'its upload is {session.status.value}')
    return session

  def _unknown(self, name: str, note: pathlib.Path, why: str) -> OSError:
    return OSError(
      f'{self._where}: whether part {name} reached the table is not known: {why}. Try '
      'again; if that does not help, look in the table for its task_idx, and if none '
      f'is there remove {note}'
    )

  def _record_session(self, name: str, upload_id: str) -> None:
    self._folder.mkdir(parents=True, exist_ok=True)
    partial = self._folder / f'.{name}.upload'
    with partial.open('w') as file:
      file.write(upload_id)
      file.flush()
      os.fsync(file.fileno())
    os.replace(partial, self._folder / f'{name}.upload')

  def _record(self, session: Any, row: DumpRow) -> Any:
    record = session.new_record()
    for name, value in row.items():
      if isinstance(value, str) and len(value.encode()) > MAX_STRING_BYTES:
        id_ = row.get('trajectory_id', '')
        log.warning('%s: %s is longer than a string may be: null', id_, name)
        value = None
      record[name] = value
    return record
