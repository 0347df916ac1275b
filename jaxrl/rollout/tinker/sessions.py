"""Sessions record which clients are alive, and what each of them holds."""

import dataclasses
import time
import uuid
from collections.abc import Callable

from jaxrl.options import JsonObject
from jaxrl.rollout.tinker.checkpoint_store import CheckpointStore
from jaxrl.rollout.tinker.pending_results import RequestError, TooManyRequestsError


class SessionEndedError(Exception):
  """A session has ended; its client stops sending heartbeats."""


@dataclasses.dataclass
class ClientSession:
  """One client's session.

  Attributes:
    session_id: Its id.
    facts: What is kept of it on the disk.
    last_seen: When it was heard of last, on the table's clock.
    run_ids: Its training runs.
    losses: Its custom losses, by id.
  """

  session_id: str
  facts: JsonObject
  last_seen: float
  run_ids: list[str] = dataclasses.field(default_factory=list)
  losses: JsonObject = dataclasses.field(default_factory=dict)


class SessionTable:
  """Holds the sessions of clients that are alive."""

  def __init__(
    self,
    store: CheckpointStore,
    *,
    max_sessions: int,
    timeout: float,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Creates an empty table.

    Args:
      store: Keeps what is known of sessions.
      max_sessions: Sessions at the same time.
      timeout: Seconds without a sign of life after which a session has ended.
      clock: Tells the seconds.
    """
    self._store, self._clock = store, clock
    self._max_sessions, self._timeout = max_sessions, timeout
    self._sessions: dict[str, ClientSession] = {}

  def create(self, **facts: object) -> ClientSession:
    """Begins a session.

    Args:
      **facts: What to keep of it.

    Raises:
      TooManyRequestsError: If there are too many.
    """
    if len(self._sessions) >= self._max_sessions:
      raise TooManyRequestsError(f'{self._max_sessions} clients are here; try later')
    session_id = uuid.uuid4().hex
    record = {**facts, 'created': time.time(), 'status': 'active', 'samplers': {}}
    self._store.save_session(session_id, record)
    session = ClientSession(session_id, record, self._clock())
    self._sessions[session_id] = session
    return session

  def touch(self, session_id: str) -> ClientSession:
    """Notes a sign of life.

    A session of an earlier process lives on, without its training runs.

    Args:
      session_id: The session.

    Raises:
      SessionEndedError: If it has ended.
      RequestError: If there is none.
    """
    session = self._sessions.get(session_id)
    if session is None:
      record = self._store.find_session(session_id)
      if record is None:
        raise RequestError(f'there is no session {session_id[:40]!r}')
      if record['status'] != 'active':
        raise SessionEndedError(f'session {session_id} has ended: {record["status"]}')
      if len(self._sessions) >= self._max_sessions:
        raise TooManyRequestsError(f'{self._max_sessions} clients are here; try later')
      session = ClientSession(session_id, record, self._clock())
      self._sessions[session_id] = session
    session.last_seen = self._clock()
    return session

  def save(self, session: ClientSession) -> None:
    """Writes what is known of a session to the disk."""
    self._store.save_session(session.session_id, session.facts)

  def end(self, session: ClientSession, status: str) -> None:
    """Ends a session.

    Args:
      session: The session.
      status: Why it ended.
    """
    session.facts['status'] = status
    self.save(session)
    self._sessions.pop(session.session_id, None)

  def find(self, session_id: str) -> ClientSession | None:
    """Returns a session that is alive; None if it is not."""
    return self._sessions.get(session_id)

  def vanished(self) -> list[ClientSession]:
    """Returns the sessions of clients that have given no sign of life for too long."""
    oldest = self._clock() - self._timeout
    return [s for s in self._sessions.values() if s.last_seen < oldest]
