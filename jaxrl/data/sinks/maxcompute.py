"""Parts of a dump as rows of a MaxCompute table, through pyodps: `odps://…`.

A part is one upload session, which the service commits whole or not at all. Its id is
noted on this machine's disk before anything is sent, so that after a kill the service
is asked whether that session was committed, and no part is there twice.
"""

import logging
import os
import pathlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl.data.sinks.columns import Row
from jaxrl.signature import ConfigError

log = logging.getLogger(__name__)

PATH = re.compile(r'odps://([^/]+)/tables/([^/]+)((?:/[^/=]+=[^/=]+)*)/?')
FORM = 'odps://PROJECT/tables/TABLE, and /NAME=VALUE for each partition column'
MAX_TEXT = 8 * 2**20  # bytes of a string that MaxCompute takes
BLOCK = 0
KEYS = ('endpoint', 'tunnel_endpoint', 'access_id', 'access_key')


class Table:
  """A table, or a partition of it, which is made where it is not there.

  path: `odps://project/tables/table/ds=name`. types: the dump's columns; the table
  must have them, in any order, and its others get null. folder: on this machine's
  disk, where the ids of uploads are kept. connect: makes pyodps's entry for a
  project; by default from ODPS_ENDPOINT, ODPS_ACCESS_ID, ODPS_ACCESS_KEY and, if set,
  ODPS_TUNNEL_ENDPOINT; without keys, from the tokens that pyodps finds.

  Rows are added to those that the partition has. Raises ConfigError for a path of
  another form.
  """

  def __init__(
    self,
    path: str,
    types: Mapping[str, str],
    folder: pathlib.Path,
    connect: Callable[[str], Any] | None = None,
  ):
    self._where = f'--config.dump.path={path}'
    match = PATH.fullmatch(path)
    if match is None:
      raise ConfigError(f'{self._where}: write {FORM}')
    self._project, self._table, parts = match.groups()
    self._partition = ','.join(filter(None, parts.split('/'))) or None
    self._types, self._folder = dict(types), folder
    self._connect = connect or self._environment

  def _environment(self, project: str) -> Any:
    try:
      from odps import ODPS  # pyright: ignore[reportMissingImports]
    except ImportError:
      raise ConfigError(
        f"{self._where}: needs pyodps: pip install 'jaxrl[odps]'"
      ) from None
    own = {key: os.environ.get(f'ODPS_{key.upper()}') for key in KEYS}
    try:
      if own['access_id'] and own['access_key'] and own['endpoint']:
        keys = own['access_id'], own['access_key'], project
        address = own['tunnel_endpoint'] or None
        return ODPS(*keys, endpoint=own['endpoint'], tunnel_endpoint=address)
      found = ODPS.from_environments()  # tokens
    except TypeError:
      found = None
    if found is None:
      raise ConfigError(
        f'{self._where}: set ODPS_ENDPOINT, ODPS_ACCESS_ID and ODPS_ACCESS_KEY in the '
        'environment'
      )
    return found

  def _session(self, upload_id: str | None = None) -> Any:
    entry = self._connect(self._project)
    from odps.tunnel import TableTunnel  # pyright: ignore[reportMissingImports]

    return TableTunnel(entry, project=self._project).create_upload_session(
      self._table, self._partition, upload_id=upload_id, create_partition=True
    )

  def check(self, *, fresh: bool) -> None:
    """Raises ConfigError unless a session can be begun and the columns are there."""
    try:
      schema = self._session().schema
    except ConfigError:
      raise
    except Exception as error:  # pyodps has many
      text = ' '.join(f'{type(error).__name__}: {error}'.split())
      raise ConfigError(f'{self._where}: cannot write there: {text}') from error
    has = {c.name: str(c.type).lower() for c in schema.simple_columns}
    for name, kind in self._types.items():
      if has.get(name) != kind:
        real = f'is a {has[name]} in' if name in has else 'is not in'
        raise ConfigError(
          f'{self._where}: column {name!r}, a {kind}, {real} the table, which has '
          f'{", ".join(f"{n} {k}" for n, k in has.items())}: set --config.dump.columns'
        )

  def write(self, name: str, rows: Sequence[Row]) -> None:
    """Adds a part, unless it was added before.

    Raises OSError where that cannot be known any more.
    """
    session = self._begun(name)
    if session is None:
      session = self._session()
      self._note(name, session.id)
    if session.status is session.Status.Closed:
      return
    with session.open_record_writer(BLOCK) as writer:
      for row in rows:
        writer.write(self._record(session, row))
    session.commit([BLOCK])

  def _begun(self, name: str) -> Any:
    """The session in which a part was begun before; None if it was not."""
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

  def _note(self, name: str, upload_id: str) -> None:
    self._folder.mkdir(parents=True, exist_ok=True)
    half = self._folder / f'.{name}.upload'
    with half.open('w') as file:
      file.write(upload_id)
      file.flush()
      os.fsync(file.fileno())
    os.replace(half, self._folder / f'{name}.upload')

  def _record(self, session: Any, row: Row) -> Any:
    record = session.new_record()
    for name, value in row.items():
      if isinstance(value, str) and len(value.encode()) > MAX_TEXT:
        id_ = row.get('trajectory_id', '')
        log.warning('%s: %s is longer than a string may be: null', id_, name)
        value = None
      record[name] = value
    return record
