"""StoreDatabase opens the experience store's tables in SQLite or another database.

jaxrl_groups has a line for each group, and jaxrl_payloads its trajectories as bytes,
apart, so that searching groups reads none of them. jaxrl_explorers describes the
settings of the writers. jaxrl_readers has a line for each name that trains. jaxrl_uses
has a line for each use of a group by a reader: at which step, and why if the group was
dropped.
"""

import contextlib
import functools
import time
import types
import uuid
from collections.abc import Iterator
from typing import Any

SCHEMA_VERSION = 1
BROKEN_FILE = ('malformed', 'not a database', 'disk I/O', 'disk is full', 'readonly')
LOCK_TIMEOUT_S = 60  # seconds that a writer waits for others to write
MAX_BLOB_BYTES = 2**32 - 1


def import_sqlalchemy() -> Any:
  """Imports SQLAlchemy.

  Returns:
    The package.

  Raises:
    ValueError: If it is not installed.
  """
  try:
    import sqlalchemy
  except ModuleNotFoundError as error:
    raise ValueError(
      "an experience store needs SQLAlchemy: pip install -e '.[store]'"
    ) from error
  return sqlalchemy


@functools.cache
def store_tables() -> Any:
  """Defines the tables of a store.

  Returns:
    A namespace of the tables by name, and `metadata` with all of them.
  """
  sa = import_sqlalchemy()
  metadata = sa.MetaData()
  number = sa.BigInteger().with_variant(sa.Integer, 'sqlite')

  def table(name: str, *parts: object, **more: object) -> Any:
    return sa.Table(f'jaxrl_{name}', metadata, *parts, **more)

  def column(name: str, kind: object, *, null: bool = False, key: bool = False) -> Any:
    return sa.Column(name, kind, primary_key=key, nullable=null, autoincrement=False)

  return types.SimpleNamespace(
    metadata=metadata,
    store=table(
      'store', column('name', sa.String(64), key=True), column('value', sa.Text)
    ),
    explorers=table(
      'explorers',
      column('run', sa.String(64), key=True),
      column('facts', sa.Text),
    ),
    groups=table(
      'groups',
      sa.Column('id', number, primary_key=True, autoincrement=True),
      column('run', sa.String(64)),
      column('tag', sa.String(255)),
      column('number', number),
      sa.UniqueConstraint('run', 'tag', 'number'),
      sqlite_autoincrement=True,
    ),
    payloads=table(
      'payloads',
      column('group_id', number, key=True),
      column('data', sa.LargeBinary(MAX_BLOB_BYTES)),
    ),
    readers=table(
      'readers',
      column('name', sa.String(255), key=True),
      column('run', sa.String(64)),
      column('owner', sa.String(255)),
      column('beat', number),
      column('saved', number, null=True),
    ),
    uses=table(
      'uses',
      column('reader', sa.String(255), key=True),
      column('group_id', number, key=True),
      column('use', sa.Integer, key=True),
      column('step', number),
      column('place', sa.Integer),
      column('lost', sa.String(64)),
      sa.Index('jaxrl_uses_step', 'reader', 'step'),
    ),
  )


class StoreDatabase:
  """An open store, which is created if there is none.

  Args:
    url: The database's SQLAlchemy URL.
    key: The config key that the URL came from, for error messages.

  Attributes:
    tables: The tables; see `store_tables`.
    name: The URL without its password.
    id: The unique id of the store.

  Raises:
    ValueError: If the URL is malformed, the database cannot be reached, or it was
      written with another schema.
  """

  def __init__(self, url: str, key: str = 'dataset.experience_store'):
    sa = import_sqlalchemy()
    self.tables = store_tables()
    try:
      parsed = sa.make_url(url)
    except sa.exc.ArgumentError as error:
      raise ValueError(
        f'{key}: not a URL of a database: sqlite:////abs/path.db, or '
        'postgresql://host/name'
      ) from error
    self.name = parsed.render_as_string(hide_password=True)
    self._where = f'{key}={self.name}'
    self._is_sqlite = False
    if parsed.get_backend_name() == 'sqlite':
      self._is_sqlite = True
      if parsed.database in (None, '', ':memory:'):
        raise ValueError(f'{self._where}: names no file: sqlite:////abs/path.db')
    try:
      self._engine = sa.create_engine(
        parsed,
        **({'connect_args': {'timeout': LOCK_TIMEOUT_S}} if self._is_sqlite else {}),
      )
      if self._is_sqlite:
        _configure_sqlite(sa, self._engine)
      self.id = self._open()
    except (sa.exc.SQLAlchemyError, ModuleNotFoundError, OSError) as error:
      reason = str(getattr(error, 'orig', None) or error).splitlines()[0]
      raise ValueError(f'{self._where}: cannot be opened: {reason}') from error

  def _open(self) -> str:
    """Returns the store's id. Other processes may be creating it at the same time."""
    errors = import_sqlalchemy().exc
    for _ in range(20):
      try:
        return self._open_or_create()
      except (errors.IntegrityError, errors.ProgrammingError):
        pass
      except errors.OperationalError as error:
        if 'locked' not in str(error) and 'exists' not in str(error):
          raise
      time.sleep(0.1)
    return self._open_or_create()

  def _open_or_create(self) -> str:
    sa, store = import_sqlalchemy(), self.tables.store
    with self.write() as connection:
      if sa.inspect(connection).has_table(store.name):
        settings = dict(tuple(row) for row in connection.execute(sa.select(store)))
        if settings.get('schema') != str(SCHEMA_VERSION):
          raise ValueError(
            f'{self._where}: was written with schema {settings.get("schema")}; this '
            f'program reads schema {SCHEMA_VERSION}: use the release that wrote it, or '
            'another store'
          )
        return settings['id']
      self.tables.metadata.create_all(connection)
      settings = {'schema': str(SCHEMA_VERSION), 'id': uuid.uuid4().hex}
      lines = [{'name': name, 'value': value} for name, value in settings.items()]
      connection.execute(sa.insert(store), lines)
      return settings['id']

  @contextlib.contextmanager
  def write(self) -> Iterator[Any]:
    """Opens a transaction; in SQLite nobody else writes meanwhile.

    Yields:
      The connection.
    """
    with self._plain_errors(), self._engine.begin() as connection:
      yield connection

  @contextlib.contextmanager
  def read(self) -> Iterator[Any]:
    """Opens a read-only transaction, which blocks nobody.

    Yields:
      The connection.
    """
    engine = self._engine.execution_options(reads=True)
    with self._plain_errors(), engine.begin() as connection:
      yield connection

  @contextlib.contextmanager
  def _plain_errors(self) -> Iterator[None]:
    """Turns errors of a damaged file or a full or read-only disk into one line."""
    errors = import_sqlalchemy().exc
    try:
      yield
    except errors.DatabaseError as error:
      reason = str(error.orig).splitlines()[0]
      if not any(word in reason for word in BROKEN_FILE):
        raise
      raise OSError(
        f'{self._where}: {reason}; check its disk, or restore it from a copy'
      ) from error

  def close(self) -> None:
    """Closes all connections."""
    self._engine.dispose()


def _configure_sqlite(sa: Any, engine: Any) -> None:
  """Puts SQLite into WAL mode: many readers and one writer, safe against kills.

  SQLite's Python driver begins a transaction at its first change, which lets two of
  them deadlock. Here transactions begin when they are opened.
  """

  @sa.event.listens_for(engine, 'connect')
  def connect(connection: Any, record: object) -> None:
    connection.isolation_level = None
    connection.execute('PRAGMA journal_mode=WAL')
    connection.execute('PRAGMA synchronous=FULL')

  @sa.event.listens_for(engine, 'begin')
  def begin(connection: Any) -> None:
    reads = connection.get_execution_options().get('reads')
    connection.exec_driver_sql('BEGIN' if reads else 'BEGIN IMMEDIATE')
