"""The tables of an experience store, in SQLite or any database of SQLAlchemy's.

jaxrl_groups has a line for each group, jaxrl_payloads its trajectories as bytes (apart,
so that looking for groups reads none of them); jaxrl_explorers what those who wrote
them played with. jaxrl_readers has a line for each name that trains, and jaxrl_uses a
line for each use of a group by a reader: at which step, and why if it was lost to it.
"""

import contextlib
import functools
import time
import types
import uuid
from collections.abc import Iterator
from typing import Any

from jaxrl.signature import ConfigError

SCHEMA = 1
PATIENCE = 60  # seconds that a writer waits for others to write
BLOB = 2**32 - 1


def sqlalchemy() -> Any:
  """The package. Raises ConfigError when it is not installed."""
  try:
    import sqlalchemy
  except ModuleNotFoundError as error:
    raise ConfigError(
      "an experience store needs SQLAlchemy: pip install 'jaxrl[store]'"
    ) from error
  return sqlalchemy


@functools.cache
def tables() -> Any:
  """The tables by name, and `metadata` with all of them."""
  sa = sqlalchemy()
  metadata = sa.MetaData()
  number = sa.BigInteger().with_variant(sa.Integer, 'sqlite')

  def table(name: str, *parts: Any, **more: Any) -> Any:
    return sa.Table(f'jaxrl_{name}', metadata, *parts, **more)

  def column(name: str, kind: Any, *, null: bool = False, key: bool = False) -> Any:
    return sa.Column(name, kind, primary_key=key, nullable=null, autoincrement=False)

  return types.SimpleNamespace(
    metadata=metadata,
    store=table(
      'store',
      column('name', sa.String(64), key=True),
      column('value', sa.Text),
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
      column('data', sa.LargeBinary(BLOB)),
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


class Database:
  """A store, opened; made where there is none.

  url: SQLAlchemy's. key: the config key it came from, for messages. Raises ConfigError
  for what is no URL, cannot be reached, or was written with another schema.
  """

  def __init__(self, url: str, key: str = 'data.source'):
    sa = sqlalchemy()
    self.tables = tables()
    try:
      parsed = sa.make_url(url)
    except sa.exc.ArgumentError as error:
      raise ConfigError(
        f'--config.{key}: not a URL of a database: sqlite:////abs/path.db, or '
        'postgresql://host/name'
      ) from error
    self.name = parsed.render_as_string(hide_password=True)
    self._where, self._lite = f'--config.{key}={self.name}', False
    if parsed.get_backend_name() == 'sqlite':
      self._lite = True
      if parsed.database in (None, '', ':memory:'):
        raise ConfigError(f'{self._where}: names no file: sqlite:////abs/path.db')
    try:
      self._engine = sa.create_engine(
        parsed, **({'connect_args': {'timeout': PATIENCE}} if self._lite else {})
      )
      if self._lite:
        _lite(sa, self._engine)
      self.id = self._open()
    except (sa.exc.SQLAlchemyError, ModuleNotFoundError) as error:
      reason = str(getattr(error, 'orig', None) or error).splitlines()[0]
      raise ConfigError(f'{self._where}: cannot be opened: {reason}') from error

  def _open(self) -> str:
    """The store's id. Others may be making it at the same time."""
    errors = sqlalchemy().exc
    for _ in range(20):
      try:
        return self._made()
      except (errors.IntegrityError, errors.ProgrammingError):
        pass
      except errors.OperationalError as error:
        if 'locked' not in str(error) and 'exists' not in str(error):
          raise
      time.sleep(0.1)
    return self._made()

  def _made(self) -> str:
    sa, store = sqlalchemy(), self.tables.store
    with self.write() as connection:
      if sa.inspect(connection).has_table(store.name):
        found = dict(tuple(row) for row in connection.execute(sa.select(store)))
        if found.get('schema') != str(SCHEMA):
          raise ConfigError(
            f'{self._where}: was written with schema {found.get("schema")}, and this '
            f'program reads schema {SCHEMA}: use the release that wrote it, or '
            'another store'
          )
        return found['id']
      self.tables.metadata.create_all(connection)
      made = {'schema': str(SCHEMA), 'id': uuid.uuid4().hex}
      lines = [{'name': name, 'value': value} for name, value in made.items()]
      connection.execute(sa.insert(store), lines)
      return made['id']

  @contextlib.contextmanager
  def write(self) -> Iterator[Any]:
    """A transaction; in SQLite nobody else writes meanwhile."""
    with self._engine.begin() as connection:
      yield connection

  @contextlib.contextmanager
  def read(self) -> Iterator[Any]:
    """A transaction that only reads, and keeps nobody waiting."""
    with self._engine.execution_options(reads=True).begin() as connection:
      yield connection

  def close(self) -> None:
    self._engine.dispose()


def _lite(sa: Any, engine: Any) -> None:
  """SQLite in WAL mode: readers and one writer at a time, whole whatever is killed.

  Its own driver begins transactions late, at the first change, which lets two of them
  deadlock; here they begin when they begin.
  """

  @sa.event.listens_for(engine, 'connect')
  def connect(connection: Any, record: Any) -> None:
    connection.isolation_level = None
    connection.execute('PRAGMA journal_mode=WAL')
    connection.execute('PRAGMA synchronous=FULL')

  @sa.event.listens_for(engine, 'begin')
  def begin(connection: Any) -> None:
    reads = connection.get_execution_options().get('reads')
    connection.exec_driver_sql('BEGIN' if reads else 'BEGIN IMMEDIATE')
